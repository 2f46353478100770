"""Text that comes token by token is the text of all tokens at once."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kvasir_runtime.engine.detokenizer import Detokenizer, StopStrings, TextOptions, WindowStream
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.server.logprobs import prompt_offsets
from kvasir_runtime.server.prompts import Prompt

TEXTS = [
    "größer, naïve — 日本語のテキスト 😀👩\N{ZERO WIDTH JOINER}🚀 end",
    "def main() -> None:\n    return  'x'\n\n",
    " leading and trailing ",
    "a\N{REPLACEMENT CHARACTER}b",
]


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return Tokenizer(backend, {})


def sentencepiece_like() -> Tokenizer:
    """As Llama 2's and Gemma's: a mark for spaces, and bytes as tokens for what the vocabulary lacks."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [chr(code) for code in range(33, 127)] + ["▁"]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *byte_tokens, *letters])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {})


def stream(tokenizer: Tokenizer, token_ids: list[int], prompt: Sequence[int] = (), **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, TextOptions(**options), prompt)
    parts = [detokenizer.feed([token_id])[0] for token_id in token_ids[:-1]]
    return [*parts, detokenizer.finish(token_ids[-1:], None)[0]]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece_like()], ids=["byte level", "sentencepiece"])
def test_parts_add_up_and_no_part_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, token_ids)
    assert "".join(parts) == tokenizer.decode(token_ids) == text
    assert sum("\N{REPLACEMENT CHARACTER}" in part for part in parts) == text.count("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_decode_as_at_once(seed: int) -> None:
    tokenizer = byte_level()
    token_ids = random.Random(seed).choices(range(1, tokenizer.vocab_size), k=200)
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("seed", range(20))
def test_window_decodes_random_bytes_of_a_byte_level_tokenizer_too(seed: int) -> None:
    tokenizer = byte_level()
    token_ids = random.Random(seed).choices(range(1, tokenizer.vocab_size), k=200)
    window = WindowStream(tokenizer)
    text = "".join(window.feed(token_id) for token_id in token_ids) + window.pending()
    assert text == tokenizer.decode(token_ids)


class CountingTokenizer(Tokenizer):
    """Counts the tokens that it decodes, which is what a stream costs."""

    num_decoded = 0

    def decode(self, token_ids: list[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize("text", ["plain text", "\N{GREEK SMALL LETTER ALPHA}"], ids=["text", "invalid bytes"])
def test_a_token_costs_the_same_however_long_the_text_has_become(text: str) -> None:
    tokenizer = sentencepiece_like()
    tokenizer.__class__ = CountingTokenizer
    assert isinstance(tokenizer, CountingTokenizer)
    window = WindowStream(tokenizer)
    token_id = tokenizer.encode(text, add_special_tokens=False)[1]  # of alpha: its first byte, so never a character
    costs = []
    for _ in range(5):
        num_decoded = tokenizer.num_decoded
        assert len("".join(window.feed(token_id) for _ in range(200))) >= 190
        costs.append(tokenizer.num_decoded - num_decoded)
    assert costs[-1] <= 1.1 * costs[1]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("prompt", [*TEXTS[:3], "</s>", "a </s>", "<s>"])
@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece_like()], ids=["byte level", "sentencepiece"])
def test_a_continuation_is_what_all_tokens_decode_to_without_the_prompts(
    tokenizer: Tokenizer, prompt: str, skips: bool
) -> None:
    """Wherever the prompt ends, within a word or a character too, and however the tokens come."""
    token_ids = tokenizer.encode(prompt + " Hello  wörld 日本 </s> x", add_special_tokens=False)
    whole = tokenizer.decode([i for i in token_ids if not (skips and i in tokenizer.special_ids)])
    for end in range(len(token_ids)):
        given, made = token_ids[:end], token_ids[end:]
        detokenizer = Detokenizer(tokenizer, TextOptions(skip_special_tokens=skips), given)
        text = "".join(detokenizer.feed(made[at : at + 3]).text for at in range(0, len(made), 3))
        text += detokenizer.finish([], None).text
        whole_characters = Detokenizer(tokenizer, TextOptions(skip_special_tokens=skips)).feed(given).text
        assert whole_characters + text == whole, (given, made)


def test_half_a_character_that_the_prompt_ends_with_is_not_given_out_again() -> None:
    for tokenizer in (byte_level(), sentencepiece_like()):
        half, letter = (
            tokenizer.encode("日", add_special_tokens=False)[:-1],
            tokenizer.encode("b", add_special_tokens=False),
        )
        assert "".join(stream(tokenizer, letter[-1:], prompt=half)) == "b"


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = byte_level()
    [end] = tokenizer.encode("<|end|>", add_special_tokens=False)
    token_ids = [*tokenizer.encode("a", add_special_tokens=False), end]
    assert "".join(stream(tokenizer, token_ids)) == "a"
    assert "".join(stream(tokenizer, token_ids, skip_special_tokens=False)) == "a<|end|>"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = byte_level()
    assert stream(tokenizer, [10**6, *tokenizer.encode("a", add_special_tokens=False)]) == ["", "a"]


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    stop = StopStrings(["</answer>", "\n\n"], include_in_output=False)
    assert [stop.feed(text)[0] for text in ("yes </", "ans", "er>", "\n", "x")] == ["yes ", "", "</anser>", "", "\nx"]


def test_first_of_several_stop_strings_ends_the_text() -> None:
    assert StopStrings(["world", "lo"], include_in_output=False).feed("hello world") == ("hel", "lo")
    assert StopStrings(["world", "lo"], include_in_output=True).feed("hello world") == ("hello", "lo")


@pytest.mark.parametrize("seed", range(30))
def test_text_in_pieces_ends_where_it_does_at_once(seed: int) -> None:
    """The first end counts, and of those that end with one piece the first start."""
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 9))) for _ in range(rng.randint(1, 4))]
    pieces = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(40)]
    stop, given, text = StopStrings(stops, include_in_output=False), "", ""
    for piece in pieces:
        text += piece
        cut = stop.feed(piece)
        given += cut.text
        found = min(((at, each) for each in stops if (at := text.find(each)) >= 0), default=None)
        if found is not None:
            assert (given, cut.stop) == (text[: found[0]], found[1])
            return
        held = text[len(given) :]
        may_become_one = [end for end in range(len(text)) if any(each.startswith(text[end:]) for each in stops)]
        assert cut.stop is None
        assert text.startswith(given)
        assert len(given) == min(may_become_one, default=len(text)), f"{held!r} is held back"


class CountedString(str):
    """Counts the beginnings of text that it is compared to, which is what text that is held back costs."""

    num_compared = 0

    def startswith(self, *beginning: Any) -> bool:
        CountedString.num_compared += 1
        return super().startswith(*beginning)


def test_text_that_is_held_back_costs_the_same_however_long_it_has_become() -> None:
    strings = ["a" * 1023 + "c", *("b" * 1023 + char for char in "defgh")]
    stop = StopStrings([CountedString(each) for each in strings], include_in_output=False)
    CountedString.num_compared = 0
    assert "".join(stop.feed("a").text for _ in range(1023)) == ""
    assert CountedString.num_compared == 1023
    assert stop.feed("b").text == "a" * 1023
    assert CountedString.num_compared <= 1023 + 1024


def test_stop_string_across_tokens_ends_the_tokens_too() -> None:
    tokenizer = byte_level()
    token_ids = [token for char in "abcdef" for token in tokenizer.encode(char, add_special_tokens=False)]
    detokenizer = Detokenizer(tokenizer, TextOptions(stop=("cd",)))
    assert detokenizer.feed(token_ids) == ("ab", "cd", 4)


def test_stop_string_within_the_least_tokens_does_not_count() -> None:
    tokenizer = byte_level()
    token_ids = [token for char in "abcabc" for token in tokenizer.encode(char, add_special_tokens=False)]
    detokenizer = Detokenizer(tokenizer, TextOptions(stop=("bc",), min_tokens=3))
    assert detokenizer.feed(token_ids) == ("abca", "bc", 6)


@pytest.mark.parametrize(("min_tokens", "expected"), [(2, ("ab", "c", 3)), (3, ("abcab", "c", 6))])
def test_a_stop_string_counts_from_the_first_token_after_the_least(
    min_tokens: int, expected: tuple[str, str, int]
) -> None:
    tokenizer = byte_level()
    token_ids = [token for char in "abcabc" for token in tokenizer.encode(char, add_special_tokens=False)]
    assert Detokenizer(tokenizer, TextOptions(stop=("c",), min_tokens=min_tokens)).feed(token_ids) == expected


@pytest.mark.parametrize(("is_shown", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_that_is_no_special_one_shows_only_when_asked_for(is_shown: bool, text: str) -> None:
    tokenizer = byte_level()
    token_ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in "ab"]
    detokenizer = Detokenizer(tokenizer, TextOptions(include_stop_str_in_output=is_shown))
    assert detokenizer.finish(token_ids, stop_token_id=token_ids[-1]) == (text, None, 2)


def test_held_text_comes_out_at_the_end() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, TextOptions(stop=("stop",)))
    token_ids = tokenizer.encode("non-sto", add_special_tokens=False)
    first, _, _ = detokenizer.feed(token_ids[:-1])
    last, stop, _ = detokenizer.finish(token_ids[-1:], None)
    assert (first + last, stop) == ("non-sto", None)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["<|end|>"], ("ab", "<|end|>", 3)),
        (["b<|end|>c"], ("a", "b<|end|>c", 4)),
        (["<|end|>x", "c<|end|>", "zz"], ("ab", "c<|end|>", 5)),
        (["<|end|>d", "bc"], ("a", "bc", 4)),
        (["<|end|>x"], ("abc|end|>", None, 13)),
        (["|end|>"], ("abc", "|end|>", 11)),
    ],
)
def test_a_stop_string_with_a_special_token_ends_the_text_at_that_token(stop: list[str], expected: tuple) -> None:
    """And not where the token is spelt out or others stand between; what is hidden stays so."""
    tokenizer = byte_level()
    token_ids = [i for part in ["a", "b", "<|end|>", "c", "<|end|>", *"|end|>z"] for i in encoded(tokenizer, part)]
    detokenizer = Detokenizer(tokenizer, TextOptions(stop=tuple(stop)))
    new, last = detokenizer.feed(token_ids[:-1]), None
    if new.stop is None:
        last = detokenizer.finish(token_ids[-1:], None)
        assert (new.text + last.text, last.stop) == (expected[0] + "z", None)
    else:
        assert new == expected


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "a"),
        ({"include_stop_str_in_output": True}, "ab<|end|>"),
        ({"skip_special_tokens": False}, "a"),
        ({"min_tokens": 3}, "abc"),
    ],
)
def test_a_special_token_of_a_stop_string_is_shown_as_asked_for(size: int, options: dict, text: str) -> None:
    tokenizer = byte_level()
    token_ids = [i for part in ["a", "b", "<|end|>", "c", "b", "<|end|>", "d"] for i in encoded(tokenizer, part)]
    detokenizer = Detokenizer(tokenizer, TextOptions(stop=("b<|end|>",), **options))
    given = ""
    for at in range(0, len(token_ids), size):
        new = detokenizer.feed(token_ids[at : at + size])
        given += new.text
        if new.stop is not None:
            break
    assert (given, new.stop) == (text, "b<|end|>")


@pytest.mark.parametrize("text", ["</s> ab a", "a</s>b", "</s></s>a😀b", "a b </s>  c</s>"])
def test_a_prompts_offsets_are_those_of_its_text_behind_special_tokens_too(text: str) -> None:
    """Where the tokenizer begins each part with a space that the text does not have."""
    tokenizer = sentencepiece_like()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    offsets = prompt_offsets(tokenizer, Prompt(token_ids, text))
    assert offsets == sorted(offsets)
    for token_id, offset, end in zip(token_ids, offsets, [*offsets[1:], len(text)], strict=True):
        if end > offset and not tokenizer.token(token_id).startswith("<0x"):
            assert text[offset:end] == tokenizer.token_bytes(token_id).decode()


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece_like()], ids=["byte level", "sentencepiece"])
def test_a_stop_string_is_found_with_its_last_token_also_where_it_could_become_another(tokenizer: Tokenizer) -> None:
    special = tokenizer.token(min(tokenizer.special_ids))
    token_ids = tokenizer.encode("xyz", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, TextOptions(stop=(f"y{special}", "y")))
    found = [detokenizer.feed([token_id]) for token_id in token_ids[:-1]]
    assert ("".join(each.text for each in found), found[-1].stop) == ("x", "y")
