"""Which blocks of a prompt are the answer that an earlier request of its conversation got."""

import pytest
from benchmarks.routing.answers import answers_of
from benchmarks.routing.trace import Trace, TraceRequest


def trace(*requests: tuple[int, int, tuple[int, ...]]) -> Trace:
    """Of blocks of ten tokens: tokens of prompt and answer, and the prompt's blocks."""
    return Trace("t", 10, tuple(TraceRequest(float(at), *request) for at, request in enumerate(requests)))


FIRST = (25, 20, (1, 2, 90))


@pytest.mark.parametrize(
    ("why", "second", "answer"),
    [
        ("the block that prompt and answer share, and one of the answer alone", (50, 1, (1, 2, 3, 4, 5)), (3, 4)),
        ("just long enough", (45, 1, (1, 2, 3, 4, 91)), (3, 4)),
        ("too short for the answer", (44, 1, (1, 2, 3, 4, 91)), None),
        ("another beginning", (50, 1, (1, 7, 3, 4, 5)), None),
    ],
)
def test_a_longer_prompt_with_the_same_beginning_tells_an_answers_blocks(
    why: str, second: tuple[int, int, tuple[int, ...]], answer: tuple[int, ...] | None
) -> None:
    assert answers_of(trace(FIRST, second)) == ({} if answer is None else {0: answer}), why


def test_a_conversation_goes_on_from_its_latest_turn() -> None:
    turns = trace(FIRST, (50, 10, (1, 2, 3, 4, 5)), (70, 1, (1, 2, 3, 4, 5, 6, 7)))
    assert answers_of(turns) == {0: (3, 4), 1: (6,)}


def test_an_answer_within_the_prompts_last_block_fills_none() -> None:
    assert answers_of(trace((25, 4, (1, 2, 90)), (60, 1, (1, 2, 3, 4, 5, 6)))) == {}
