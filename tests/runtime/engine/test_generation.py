"""A whole answer: what it is made of, and when whoever waits for it is woken."""

import asyncio

import pytest

from kvasir_runtime.engine.generation import Generation, SequenceDelta
from kvasir_runtime.errors import RequestFailedError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def generation() -> Generation:
    return Generation([0, 1], lambda: None)


async def test_a_whole_answer_has_all_sequences_by_their_index(generation: Generation) -> None:
    generation.receive(SequenceDelta(index=1, text="x", token_ids=[7], finish_reason="length"))
    for text, token, reason in (("a", 5, None), ("b", 6, "stop")):
        generation.receive(SequenceDelta(index=0, text=text, token_ids=[token], finish_reason=reason))
    first, second = await generation.whole()
    assert (first.index, first.text, first.token_ids, first.finish_reason) == (0, "ab", [5, 6], "stop")
    assert (second.index, second.text, second.token_ids, second.finish_reason) == (1, "x", [7], "length")


async def test_of_no_sequences_it_is_there_at_once() -> None:
    assert await asyncio.wait_for(Generation([], lambda: None).whole(), 5) == []


async def test_its_reader_is_woken_by_the_last_end_alone(generation: Generation) -> None:
    reader = generation.whole().__await__()
    woken = next(reader)
    for delta in (
        SequenceDelta(index=0, text="a"),
        SequenceDelta(index=1, finish_reason="length"),
        SequenceDelta(index=0, text="b"),
    ):
        generation.receive(delta)
        assert not woken.done()
    generation.receive(SequenceDelta(index=0, finish_reason="stop"))
    assert woken.done()


async def test_its_reader_gets_an_error_at_once(generation: Generation) -> None:
    generation.receive(SequenceDelta(index=0, text="a"))
    reader = generation.whole().__await__()
    woken = next(reader)
    generation.fail(RequestFailedError("lost"))
    assert woken.done()
    with pytest.raises(RequestFailedError, match="lost"):
        await generation.whole()
