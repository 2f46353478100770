"""An answer's grammar behind what a model thinks first."""

import numpy as np
import pytest
from tests.runtime.exactness.conftest import VOCAB_SIZE, byte_vocabulary

from kvasir_runtime.structured.grammars import (
    Thought,
    behind_a_thought,
    choice_grammar,
    ebnf_grammar,
    json_object_grammar,
    regex_grammar,
)
from kvasir_runtime.structured.vocabulary import num_words

GRAMMARS = {
    "{}": json_object_grammar(),
    "aab": regex_grammar("a+b"),
    "x": choice_grammar(["x", "yy"]),
    "q": ebnf_grammar('root ::= "q"'),
    "z": ebnf_grammar('start: "z"'),
}
VOCABULARY = byte_vocabulary(VOCAB_SIZE)
OPENED, CLOSED = 256, 257
"""Special tokens."""


def follows(grammar: str, token_ids: list[int]) -> bool:
    """Whether this is a whole answer."""
    matcher = VOCABULARY.matcher(grammar)
    if matcher.num_valid(token_ids) < len(token_ids):
        return False
    matcher.accept(token_ids)
    return matcher.is_complete or matcher.fill(np.zeros(num_words(VOCAB_SIZE), dtype=np.int32))


@pytest.mark.parametrize(
    ("before", "if_open", "if_not"),
    [
        ("", False, True),
        ("hm", False, False),
        ("hm</think>", True, False),
        ("</think>\n\n", True, False),
        ("hm</think>\n\n\n", False, False),
        ("<think>h<</think>", True, True),
        ("<think>\nhö\n</think>\n", True, True),
        ("<think>", False, False),
    ],
)
@pytest.mark.parametrize("answer", GRAMMARS)
def test_an_answer_comes_at_once_or_behind_a_thought(answer: str, before: str, if_open: bool, if_not: bool) -> None:
    for is_open, is_right in ((True, if_open), (False, if_not)):
        thought = Thought("<think>", "</think>", is_open=is_open, special_tokens={})
        grammar = behind_a_thought(GRAMMARS[answer], thought)
        assert follows(grammar, list((before + answer).encode())) is is_right, is_open
        assert not follows(grammar, list(f"{before}{answer}!".encode()))


@pytest.mark.parametrize("is_open", [True, False])
def test_marks_that_are_special_tokens_are_these_and_no_text(is_open: bool) -> None:
    special = {"[THINK]": OPENED, "[/THINK]": CLOSED}
    grammar = behind_a_thought(GRAMMARS["x"], Thought("[THINK]", "[/THINK]", is_open=is_open, special_tokens=special))
    opened = [] if is_open else [OPENED]
    assert follows(grammar, [*opened, *b"hm [/THINK] hm", CLOSED, *b"\nx"])
    assert not follows(grammar, [*opened, *b"hm[/THINK]x"])
    assert not follows(grammar, [*b"[THINK]hm", *b"[/THINK]x"])
