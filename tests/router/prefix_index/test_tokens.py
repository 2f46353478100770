"""Prompts to token ids: whole and in pieces alike, for tokenizers that allow cutting and for those that do not."""

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers

from kvasir_router.dialects.dialect import Prompt
from kvasir_router.prefix_index.tokens import (
    CHUNK_CHARACTERS,
    ENTRY_BYTES,
    PieceCache,
    PromptTokenizer,
    TokenizerCard,
    UnusableTokenizerError,
    find_separator,
)

FOLDER = Path(__file__).parents[3] / "examples/models/kvasir-python-700k"
TEMPLATE = (FOLDER / "chat_template.jinja").read_text()


def card(tokenizer: tokenizers.Tokenizer | None = None, chat_template: str | None = TEMPLATE) -> TokenizerCard:
    text = (FOLDER / "tokenizer.json").read_text() if tokenizer is None else tokenizer.to_str()
    return TokenizerCard(text, "digest", chat_template, {"eos_token": "<|im_end|>"})


def chat(messages: Any, **fields: Any) -> Prompt:
    raw_fields = tuple((name, msgspec.Raw(msgspec.json.encode(value))) for name, value in fields.items())
    return Prompt(b"", False, b"", msgspec.Raw(msgspec.json.encode(messages)), raw_fields)


def ids(tokens: bytes | None) -> list[int]:
    assert tokens is not None
    return list(array("I", tokens))


@pytest.fixture(scope="module")
def own() -> PromptTokenizer:
    return PromptTokenizer(card(), PieceCache(10**6))


@pytest.fixture(scope="module")
def whole() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


TEXTS = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "a", " ", "\n", "é", "def f():", "<|", "1"]))


@given(pieces=TEXTS)
@settings(max_examples=300, deadline=None)
def test_a_text_cut_at_its_special_tokens_gives_the_same_tokens(
    own: PromptTokenizer, whole: tokenizers.Tokenizer, pieces: list[str]
) -> None:
    text = "".join(pieces)
    assert ids(own.encode(text, add_special_tokens=False)) == whole.encode(text, add_special_tokens=False).ids


def test_the_example_models_texts_are_cut(whole: tokenizers.Tokenizer) -> None:
    assert separator_of(whole, TEMPLATE) in ("<|im_start|>", "<|im_end|>")


def test_a_conversation_is_rendered_and_tokenised(own: PromptTokenizer, whole: tokenizers.Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids(own.tokens(chat([{"role": "user", "content": "hi"}]))) == whole.encode(text).ids


class Remembering(PieceCache):
    """What has been tokenised, piece by piece."""

    def __init__(self) -> None:
        super().__init__(10**6)
        self.texts: list[str] = []

    def put(self, owner: object, text: str, tokens: bytes) -> None:
        self.texts.append(text)
        super().put(owner, text, tokens)


def test_only_what_is_new_in_a_conversation_is_tokenised() -> None:
    pieces = Remembering()
    tokenizer = PromptTokenizer(card(), pieces)
    messages = [{"role": "user", "content": "first " * 50}, {"role": "assistant", "content": "second"}]
    tokenizer.tokens(chat(messages))
    pieces.texts.clear()
    tokenizer.tokens(chat([*messages, {"role": "user", "content": "third"}]))
    assert "first" not in "".join(pieces.texts)
    assert "third" in "".join(pieces.texts)


def test_text_is_tokenised_as_completions_are(own: PromptTokenizer, whole: tokenizers.Tokenizer) -> None:
    assert ids(own.tokens(Prompt(b"def f():", False, b"", is_text=True))) == whole.encode("def f():").ids


def test_token_ids_are_themselves(own: PromptTokenizer) -> None:
    content = array("I", [5, 6]).tobytes()
    assert own.tokens(Prompt(content, True, b"")) == content


@pytest.mark.parametrize(
    "messages",
    [
        {},
        [],
        ["hi"],
        [{"content": "hi"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_what_is_no_plain_conversation_has_no_tokens(own: PromptTokenizer, messages: Any) -> None:
    assert own.tokens(chat(messages)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": []},
        {"add_generation_prompt": "yes"},
        {"reasoning_effort": 3},
    ],
)
def test_fields_that_an_engine_refuses_give_no_tokens(own: PromptTokenizer, fields: dict[str, Any]) -> None:
    assert own.tokens(chat([{"role": "user", "content": "hi"}], **fields)) is None


def test_text_that_is_not_utf8_has_no_tokens(own: PromptTokenizer) -> None:
    assert own.tokens(Prompt(b"\xff", False, b"", is_text=True)) is None


def test_a_model_without_template_has_no_conversations() -> None:
    plain = PromptTokenizer(card(chat_template=None), PieceCache(10**6))
    assert plain.tokens(chat([{"role": "user", "content": "hi"}])) is None


# Tokenizers of other families, small but with their steps.


def words(**steps: Any) -> tokenizers.Tokenizer:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "a", "b", "\N{LOWER ONE EIGHTH BLOCK}a", "<s>"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    for name, step in steps.items():
        setattr(tokenizer, name, step)
    return tokenizer


def separator_of(tokenizer: tokenizers.Tokenizer, template: str = "<a><b>") -> str | None:
    found = find_separator(tokenizer, json.loads(tokenizer.to_str()), template)
    return None if found is None else found.text


def with_tokens(tokenizer: tokenizers.Tokenizer, *tokens: AddedToken) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


def special(text: str, **options: bool) -> AddedToken:
    return AddedToken(text, special=True, **({"normalized": False} | options))


def test_the_token_that_the_template_writes_most_is_cut_at() -> None:
    tokenizer = with_tokens(words(), special("<a>"), special("<b>"))
    assert separator_of(tokenizer, "<a><b><b>") == "<b>"


@pytest.mark.parametrize(
    "tokenizer",
    [
        with_tokens(words(), special("<c>")),  # the template does not write it
        with_tokens(words(), special("<a>", lstrip=True)),
        with_tokens(words(), special("<a>", rstrip=True)),
        with_tokens(words(), special("<a>", normalized=True)),
        with_tokens(words(), special("<a>"), special("<c>", single_word=True)),
        with_tokens(words(), special("<a>"), special("<a>>")),
        with_tokens(words(), special("<a>"), special("><a")),
        with_tokens(words(), special("<a>"), special("x<")),
        with_tokens(words(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")), special("<a>")),
        with_tokens(
            words(
                pre_tokenizer=pre_tokenizers.Sequence(
                    [pre_tokenizers.Punctuation(), pre_tokenizers.Metaspace(prepend_scheme="first")]
                )
            ),
            special("<a>"),
        ),
    ],
)
def test_a_text_is_not_cut_where_that_could_change_its_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    assert separator_of(tokenizer) is None


@pytest.mark.parametrize(
    "steps",
    [
        {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"normalizer": normalizers.Prepend("b"), "pre_tokenizer": pre_tokenizers.Whitespace()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])},
    ],
)
@given(pieces=st.lists(st.sampled_from(["<a>", "a", " ", "b", "<", "a>"])))
@settings(max_examples=60, deadline=None)
def test_other_steps_see_each_piece_alone(steps: dict[str, Any], pieces: list[str]) -> None:
    tokenizer = with_tokens(words(**steps), special("<a>"))
    prompts = PromptTokenizer(card(tokenizer, "<a>"), PieceCache(10**6))
    assert separator_of(tokenizer, "<a>") is not None
    text = "".join(pieces)
    assert ids(prompts.encode(text, add_special_tokens=False)) == tokenizer.encode(text, add_special_tokens=False).ids


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split_by(*patterns: str) -> pre_tokenizers.Sequence:
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, PLAIN_BYTES])


def trained(
    pre_tokenizer: Any, *tokens: AddedToken, normalizer: Any = None, model: models.Model | None = None
) -> tokenizers.Tokenizer:
    """On this file."""
    tokenizer = tokenizers.Tokenizer(model or models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    return with_tokens(tokenizer, *tokens)


CUTTING = {
    "own": tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json")),
    "gpt-2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama 3": trained(split_by(LLAMA_3), special("<a>")),
    "qwen": trained(split_by(LLAMA_3.replace("{1,3}", "")), normalizer=normalizers.NFC()),
    "gpt-4o": trained(split_by(GPT_4O)),
    "deepseek": trained(split_by(r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", GPT_2)),
}
WHOLE = {
    "sentencepiece": trained(pre_tokenizers.Metaspace()),
    "no pattern": trained(PLAIN_BYTES),
    "space before": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "looks back": trained(split_by(r"(?<=a) b|" + GPT_2)),
    "looks ahead": trained(split_by(r"a(?= b)|" + GPT_2)),
    "two words": trained(split_by(r"\p{L}+ \p{L}+|" + GPT_2)),
    "whole lines": trained(split_by(r".+|\n")),
    "another normalizer": trained(split_by(GPT_2), normalizer=normalizers.Lowercase()),
    "a token of two words": trained(split_by(GPT_2), special("a b")),
    "a token that takes spaces": trained(split_by(GPT_2), special("<a>", rstrip=True)),
    "a word that is a token": trained(split_by(GPT_2), special("a", single_word=True)),
    "merges that are left out": trained(split_by(GPT_2), model=models.BPE(dropout=0.1)),
    "no merges": words(),
}
ODD = [
    "it's",
    " I'LL",
    "  ",
    "\n\n",
    " \n",
    "\t",
    "1234",
    " 5",
    "a",
    " b",
    "Word",
    "\u00e9",
    "\u0301",
    "\u4e2d\u6587",
    "\U0001f600",
    "--",
    "<a>",
]


@pytest.mark.parametrize("name", CUTTING)
@given(parts=st.lists(st.sampled_from(ODD), min_size=4), times=st.integers(100, 400))
@settings(max_examples=25, deadline=None)
def test_a_long_text_cut_behind_words_gives_the_same_tokens(name: str, parts: list[str], times: int) -> None:
    prompts = PromptTokenizer(card(CUTTING[name], None), PieceCache(10**7))
    text = "x" + "".join(parts) * times
    assert (
        ids(prompts.encode(text, add_special_tokens=False)) == CUTTING[name].encode(text, add_special_tokens=False).ids
    )


@pytest.mark.parametrize(("name", "is_cut"), [*((name, True) for name in CUTTING), *((name, False) for name in WHOLE)])
def test_a_long_text_is_cut_only_where_the_tokenizer_cuts_too(name: str, is_cut: bool) -> None:
    pieces = Remembering()
    PromptTokenizer(card((CUTTING | WHOLE)[name], None), pieces).encode(
        " ".join(f"word a{number}" for number in range(500)), add_special_tokens=False
    )
    assert (len(pieces.texts) > 3) is is_cut


def test_only_what_is_new_behind_a_long_text_is_tokenised() -> None:
    pieces = Remembering()
    tokenizer = PromptTokenizer(card(), pieces)
    text = " ".join(map(str.lower, ["def hello return name"] * 500))
    tokenizer.encode(text + " one", add_special_tokens=False)
    pieces.texts.clear()
    tokenizer.encode(text + " other", add_special_tokens=False)
    assert len("".join(pieces.texts)) < 2 * CHUNK_CHARACTERS


def test_special_tokens_go_around_a_text() -> None:
    around = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 4)])
    tokenizer = with_tokens(words(pre_tokenizer=pre_tokenizers.Whitespace(), post_processor=around), special("<a>"))
    prompts = PromptTokenizer(card(tokenizer, "<a>"), PieceCache(10**6))
    for text in ("a b<a>a", ""):
        assert ids(prompts.encode(text, add_special_tokens=True)) == tokenizer.encode(text).ids


def test_what_is_no_tokenizer_or_template_is_said() -> None:
    with pytest.raises(UnusableTokenizerError, match=r"tokenizer\.json cannot be read"):
        PromptTokenizer(TokenizerCard("{}", "digest"), PieceCache(10**6))
    with pytest.raises(UnusableTokenizerError, match="no Jinja"):
        PromptTokenizer(card(chat_template="{% if %}"), PieceCache(10**6))


def test_the_cache_is_bounded_and_keeps_what_is_used() -> None:
    piece_bytes = ENTRY_BYTES + 49 + 1 + 4
    cache = PieceCache(max_bytes=3 * piece_bytes)
    for text in ("a", "b", "c"):
        cache.put(None, text, b"1234")
    assert cache.get(None, "a") == b"1234"
    cache.put(None, "d", b"1234")
    assert [cache.get(None, text) is not None for text in "abcd"] == [True, False, True, True]
    cache.put(None, "e" * 2000, b"")
    assert cache.num_bytes <= 3 * piece_bytes


def test_two_tokenizers_may_share_a_cache_and_not_their_tokens(whole: tokenizers.Tokenizer) -> None:
    pieces = PieceCache(10**6)
    bytewise = tokenizers.Tokenizer(models.WordLevel({"def": 0, "?": 1}, unk_token="?"))
    for tokenizer in (whole, bytewise):
        prompts = PromptTokenizer(card(tokenizer, None), pieces)
        assert ids(prompts.encode("def", add_special_tokens=False)) == tokenizer.encode("def").ids


def test_bytes_that_an_engine_makes_another_prompt_of_have_no_tokens(own: PromptTokenizer) -> None:
    assert own.tokens(Prompt(b"one\0two", False, b"")) is None
