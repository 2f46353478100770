"""An answer's grammar behind what a model thinks first."""

from dataclasses import replace

import numpy as np
import pytest
from tests.runtime.exactness.conftest import VOCAB_SIZE, ByteTable

from kvasir_runtime.structured.grammars import choice_grammar, ebnf_grammar, either, json_object_grammar, regex_grammar
from kvasir_runtime.structured.thoughts import Thought, behind_a_thought, behind_marks
from kvasir_runtime.structured.vocabulary import Matcher, Vocabulary, num_words

GRAMMARS = {
    "{}": json_object_grammar(),
    "aab": regex_grammar("a+b"),
    "x": choice_grammar(["x", "yy"]),
    "q": ebnf_grammar('root ::= "q"'),
    "z": ebnf_grammar('start: "z"'),
}
OPENED, CLOSED, CALL = 256, 257, 258
SPECIAL = range(258, VOCAB_SIZE)


class MarkTable(ByteTable):
    """With marks that are tokens and not special, as Qwen's are."""

    special_ids = frozenset(SPECIAL)

    def token_bytes(self, token_id: int) -> bytes:
        return {OPENED: b"<think>", CLOSED: b"</think>"}.get(token_id) or super().token_bytes(token_id)


PIECES = Vocabulary(ByteTable(), VOCAB_SIZE)
MARKS = Vocabulary(MarkTable(), VOCAB_SIZE)
TOKENS = {"<think>": OPENED, "</think>": CLOSED}


def think(*, is_open: bool, max_tokens: int | None = None, tokens: dict[str, int] = TOKENS) -> Thought:
    return Thought(opened="<think>", closed="</think>", is_open=is_open, max_tokens=max_tokens, token_ids=tokens)


def follows(vocabulary: Vocabulary, grammar: str, *pieces: str | int) -> bool:
    """Whether this is a whole answer."""
    token_ids = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else piece.encode())]
    matcher = vocabulary.matcher(grammar)
    if matcher.num_valid(token_ids) < len(token_ids):
        return False
    matcher.accept(token_ids)
    return matcher.is_complete or matcher.fill(np.zeros(num_words(VOCAB_SIZE), dtype=np.int32))


def allowed(matcher: Matcher) -> list[int]:
    words = np.zeros(num_words(VOCAB_SIZE), dtype=np.int32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


BEFORE = [
    ("", False, True),
    ("hm", False, False),
    ("hm</think>", True, False),
    ("</think>\n\n", True, False),
    ("hm</think>\n\n\n", False, False),
    ("<think>h<</think>", True, True),
    ("<think>\nhö\n</think>\n", True, True),
    ("<think>", False, False),
]


@pytest.mark.parametrize(("before", "if_open", "if_not"), BEFORE)
@pytest.mark.parametrize("answer", GRAMMARS)
def test_an_answer_comes_at_once_or_behind_a_thought(answer: str, before: str, if_open: bool, if_not: bool) -> None:
    for is_open, is_right in ((True, if_open), (False, if_not)):
        grammar = behind_a_thought(GRAMMARS[answer], think(is_open=is_open, tokens={}))
        assert follows(PIECES, grammar, before, answer) is is_right, is_open
        assert not follows(PIECES, grammar, before, answer, "!")


@pytest.mark.parametrize(("before", "if_open", "if_not"), BEFORE)
def test_marks_of_one_token_are_these_tokens(before: str, if_open: bool, if_not: bool) -> None:
    pieces: list[str | int] = [before]
    for mark, token_id in TOKENS.items():
        pieces = [
            part for piece in pieces for part in ([piece] if isinstance(piece, int) else _parted(piece, mark, token_id))
        ]
    for is_open, is_right in ((True, if_open), (False, if_not)):
        grammar = behind_a_thought(GRAMMARS["x"], think(is_open=is_open))
        assert follows(MARKS, grammar, *pieces, "x") is is_right, is_open
        assert not follows(MARKS, grammar, *([] if is_open else [OPENED]), "hm", "</think>", "x")


def _parted(text: str, mark: str, token_id: int) -> list[str | int]:
    first, *others = text.split(mark)
    return [first, *(part for other in others for part in (token_id, other))]


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_budget_ends_a_thought_in_time(budget: int, is_open: bool) -> None:
    grammar = behind_a_thought(None, think(is_open=is_open, max_tokens=budget), SPECIAL)
    matcher = MARKS.matcher(grammar)
    if not is_open:
        matcher.accept([OPENED])
    for _ in range(budget):
        assert len(allowed(matcher)) > 150
        matcher.accept(b"a")
    assert allowed(matcher) == [CLOSED]
    matcher.accept([CLOSED])
    assert matcher.num_valid([*b"\n\nHi ", CALL, *b"{}", CALL + 1, CALL + 2]) == 10
    assert MARKS.matcher(grammar).num_valid([*([] if is_open else [OPENED]), CLOSED, *b"Hi"]) == 3 + (not is_open)


def test_a_thought_without_a_mark_is_not_the_answer_where_its_length_counts() -> None:
    grammar = behind_a_thought(None, think(is_open=False, max_tokens=3), SPECIAL)
    assert follows(MARKS, grammar, "Hi, not a <think> at all", CALL, "<think>")
    assert follows(MARKS, grammar)
    assert not follows(MARKS, grammar, "<think>Hi")
    assert not follows(MARKS, grammar, "\n<think>Hi")


@pytest.mark.parametrize(("thought", "rest"), [("aaaaa", "</think>"), ("aaa</", "think>"), ("aaa<<", "/think>")])
@pytest.mark.parametrize("answer", [None, GRAMMARS["x"]], ids=["free", "held"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_budget_ends_a_thought_by_a_mark_of_several_tokens(
    is_open: bool, answer: str | None, thought: str, rest: str
) -> None:
    """Which the model may have begun."""
    matcher = PIECES.matcher(behind_a_thought(answer, think(is_open=is_open, max_tokens=5, tokens={})))
    matcher.accept(("" if is_open else "<think>").encode() + thought[:4].encode())
    assert len(allowed(matcher)) > 150
    matcher.accept(thought[4:].encode())
    for byte in rest.encode():
        assert allowed(matcher) == [byte]
        matcher.accept([byte])
    assert matcher.num_valid(b"\nx") == 2


def test_a_budget_that_is_not_spent_changes_nothing() -> None:
    for tokens, vocabulary in ((TOKENS, MARKS), ({}, PIECES)):
        free, limited = (
            vocabulary.matcher(behind_a_thought(GRAMMARS["x"], think(is_open=False, max_tokens=number, tokens=tokens)))
            for number in (None, 12)
        )
        opened, closed = ([OPENED], [CLOSED]) if tokens else (b"<think>", b"</think>")
        for token_id in [*opened, *b"abc", *closed, *b"\n\nx"]:
            assert allowed(limited) == allowed(free)
            free.accept([token_id])
            limited.accept([token_id])
        assert limited.is_complete


def test_a_budget_waits_for_the_end_of_a_character() -> None:
    matcher = PIECES.matcher(behind_a_thought(GRAMMARS["x"], think(is_open=True, max_tokens=2, tokens={})))
    matcher.accept("日".encode()[:2])
    assert allowed(matcher) == [*range(0x80, 0xC0)]
    matcher.accept("日".encode()[2:])
    assert allowed(matcher) == [*b"<"]


def test_behind_a_thought_that_was_ended_no_other_may_begin() -> None:
    """Messages on other channels may."""
    start, channel, message, end = SPECIAL[:4]
    marks = {"<S>": start, "<C>": channel, "<M>": message, "<E>": end}
    thought = Thought(
        opened="<C>analysis<M>", closed="<E>", is_open=False, behind="<S>assistant", is_optional=False,
        token_ids=marks, max_tokens=2,
    )  # fmt: skip
    matcher = MARKS.matcher(behind_a_thought(None, thought, SPECIAL))
    matcher.accept([channel, *b"analysis", message, *b"hm"])
    assert allowed(matcher) == [end]
    matcher.accept([end, start, *b"assistant", channel])
    assert matcher.num_valid(b"analysis") < len(b"analysis")
    final = [*b"commentary", message, *b"So", end, start, *b"assistant", channel, *b"final", message, *b"Yes"]
    assert matcher.num_valid(final) == len(final)


def test_thoughts_may_be_messages_on_a_channel_of_their_own() -> None:
    start, channel, message, end = SPECIAL[:4]
    thought = Thought(
        opened="<C>analysis<M>",
        closed="<E>",
        is_open=False,
        behind="<S>assistant",
        token_ids={"<S>": start, "<C>": channel, "<M>": message, "<E>": end},
    )
    grammar = behind_a_thought(behind_marks("<C>final<M>", GRAMMARS["x"], thought.token_ids), thought)
    final = (channel, "final", message, "x")
    assert follows(MARKS, grammar, *final)
    assert follows(MARKS, grammar, channel, "analysis", message, "hm", end, start, "assistant", *final)
    assert not follows(MARKS, grammar, channel, "analysis", message, "hm", end, *final)
    assert not follows(MARKS, grammar, "x")
    always = behind_a_thought(GRAMMARS["x"], replace(thought, is_optional=False))
    assert follows(MARKS, always, channel, "analysis", message, end, start, "assistantx")
    assert not follows(MARKS, always, "x")


def test_an_answer_may_follow_one_of_two_grammars() -> None:
    grammar = either(GRAMMARS["aab"], GRAMMARS["{}"])
    assert [follows(MARKS, grammar, text) for text in ("aab", "{}", "x", "aab{}")] == [True, True, False, False]
