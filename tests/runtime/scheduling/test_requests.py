"""What the requests that have not ended cost when they come, fork and leave."""

import pytest
from tests.runtime.scheduling.conftest import Engine
from tests.runtime.scheduling.fake_rank import continuation

from kvasir_runtime.kv_cache import sequence_blocks
from kvasir_runtime.kv_cache.kv_cache import TableWrite
from kvasir_runtime.scheduling.step_draft import RowChanges

PROMPT = list(range(42))
NUM_BLOCKS = 10
"""That the prompt fills."""


class HashedBlocks:
    def __init__(self) -> None:
        self.number = 0


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> HashedBlocks:
    """Counts the blocks whose hash is found out."""
    hashed, hash_blocks = HashedBlocks(), sequence_blocks.hash_blocks

    def counting(*args: object) -> list[bytes]:
        digests = hash_blocks(*args)
        hashed.number += len(digests)
        return digests

    monkeypatch.setattr(sequence_blocks, "hash_blocks", counting)
    return hashed


def begin(engine: Engine, n: int, *, num_steps: int = 0) -> str:
    request = engine.add(PROMPT, n=n)
    for _ in range(num_steps):
        engine.step()
    return request


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("end", ["abort", "give up"])
def test_a_request_that_ends_before_its_fork_has_no_heir_wait(make_engine, num_steps, end) -> None:
    engine = make_engine(budget=8)
    request = begin(engine, 16, num_steps=num_steps)
    pushed: list[object] = []
    engine.scheduler._waiting.push = pushed.append
    if end == "abort":
        engine.scheduler.abort(request)
    else:
        assert [each.output.index for each in engine.scheduler.give_up(request, "gone")] == list(range(16))
    assert (pushed, engine.scheduler.has_work, engine.kv.pool.num_used) == ([], False, 0)
    stats = engine.scheduler.stats(0, 0.0)
    assert (stats.num_waiting, stats.num_held, stats.waiting_uncached_tokens) == (0, 0, 0)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_an_heir_that_takes_its_parents_place_takes_its_hashes(make_engine, hashed, num_steps) -> None:
    engine = make_engine(budget=8)
    request = begin(engine, 16, num_steps=num_steps)
    for index in range(15):
        engine.scheduler.abort(request, index)
    assert hashed.number == NUM_BLOCKS
    assert engine.run() == {f"{request}.15": continuation(PROMPT, 8)}


def test_heirs_for_which_there_are_no_rows_take_their_parents_hashes(make_engine, hashed) -> None:
    engine = make_engine(max_num_seqs=2, budget=64)
    request = begin(engine, 6, num_steps=2)
    assert engine.scheduler.stats(0, 0.0).num_waiting == 4
    assert hashed.number == NUM_BLOCKS
    assert engine.run() == {
        name: continuation(PROMPT, 8) for name in (request, *(f"{request}.{index}" for index in range(1, 6)))
    }


def test_what_the_ranks_do_not_know_of_a_parents_table_is_looked_for_once(make_engine, monkeypatch) -> None:
    engine = make_engine()
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    begin(engine, 6)
    looked_at: list[int] = []
    table_writes_of = RowChanges.table_writes_of

    def counting(changes: RowChanges, row: int, num_blocks: int) -> list[TableWrite]:
        looked_at.append(row)
        return table_writes_of(changes, row, num_blocks)

    monkeypatch.setattr(RowChanges, "table_writes_of", counting)
    while not looked_at:
        engine.step()
    assert len(looked_at) == 1
    assert len(engine.run()) == 7
