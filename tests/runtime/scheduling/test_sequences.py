"""What the requests that have not ended cost when they come, fork and leave."""

import pytest
from tests.runtime.scheduling.conftest import BLOCK_SIZE, Engine
from tests.runtime.scheduling.fake_rank import continuation

from kvasir_runtime.scheduling.request import Sequence
from kvasir_runtime.scheduling.waiting import OrderedQueue

PROMPT = list(range(42))
NUM_BLOCKS = 10
"""That the prompt fills."""


class ReadPrompt(list[int]):
    """Counts the tokens that are taken out of it, which is done to hash them."""

    num_read = 0

    def __getitem__(self, which):
        found = super().__getitem__(which)
        self.num_read += len(found) if isinstance(which, slice) else 0
        return found


class WatchedQueue(OrderedQueue):
    """Counts those that began to wait."""

    num_pushed = 0

    def push(self, sequence: Sequence) -> None:
        self.num_pushed += 1
        super().push(sequence)


def begin(engine: Engine, n: int, *, num_steps: int = 0, prompt: list[int] = PROMPT) -> str:
    request = engine.add(prompt, n=n)
    for _ in range(num_steps):
        engine.step()
    return request


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("end", ["abort", "give up"])
def test_a_request_that_ends_before_its_fork_has_no_child_wait(make_engine, num_steps, end) -> None:
    queue = WatchedQueue(by_priority=False)
    engine = make_engine(budget=8, queue=queue)
    request = begin(engine, 16, num_steps=num_steps)
    if end == "abort":
        engine.scheduler.abort(request)
    else:
        assert [each.output.index for each in engine.scheduler.give_up(request, "gone")] == list(range(16))
    assert (queue.num_pushed, engine.scheduler.has_work, engine.kv.pool.num_used) == (1, False, 0)
    stats = engine.scheduler.stats(0, 0.0)
    assert (stats.num_waiting, stats.num_held, stats.waiting_uncached_tokens) == (0, 0, 0)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_child_that_takes_its_parents_place_takes_its_hashes(make_engine, num_steps) -> None:
    engine, prompt = make_engine(budget=8), ReadPrompt(PROMPT)
    request = begin(engine, 16, num_steps=num_steps, prompt=prompt)
    for index in range(15):
        engine.scheduler.abort(request, index)
    assert prompt.num_read == NUM_BLOCKS * BLOCK_SIZE
    assert engine.run() == {f"{request}.15": continuation(PROMPT, 8)}


def test_children_for_which_there_are_no_rows_take_their_parents_hashes(make_engine) -> None:
    engine, prompt = make_engine(max_num_seqs=2, budget=64), ReadPrompt(PROMPT)
    request = begin(engine, 6, num_steps=2, prompt=prompt)
    assert engine.scheduler.stats(0, 0.0).num_waiting == 4
    assert prompt.num_read == NUM_BLOCKS * BLOCK_SIZE
    assert engine.run() == {
        name: continuation(PROMPT, 8) for name in (request, *(f"{request}.{index}" for index in range(1, 6)))
    }
