"""A step being put together: changes of rows, and what is dropped with a row that was given up."""

import numpy as np
import pytest

from kvasir_runtime.kv_cache.block_pool import Block
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import Fork, NewSequence
from kvasir_runtime.scheduling.step_draft import RowChanges, StepDraft

SAMPLING = SamplingParams(max_tokens=1, seed=0)


def make_draft() -> StepDraft:
    """Rows 3 and 5 decode, with two drafts and none; rows 1 and 2 compute chunks."""
    draft = StepDraft.empty(20)
    draft.set_decodes(np.array([3, 5]), np.array([7, 9]), np.array([3, 1]))
    draft.add_chunk(1, 0, 4, [Block(40)], samples=True)
    draft.add_chunk(2, 8, 5, [Block(41), Block(42)], samples=False)
    return draft


def test_forks_are_told_by_their_source():
    changes = RowChanges(forks=[Fork(0, 1, SAMPLING), Fork(2, 3, SAMPLING), Fork(0, 4, SAMPLING)])
    assert (changes.forks_from(0), changes.forks_from(2), changes.forks_from(1)) == ([1, 4], [3], [])


def test_table_writes_of_the_first_blocks_are_told_by_row():
    changes = RowChanges()
    changes.write_tables(1, [(0, 0, 10), (1, 0, 11), (0, 1, 13)])
    changes.write_tables(2, [(0, 0, 12)])
    assert changes.table_writes == [(1, 0, 0, 10), (1, 1, 0, 11), (1, 0, 1, 13), (2, 0, 0, 12)]
    assert changes.table_writes_of(1, 1) == [(0, 0, 10), (1, 0, 11)]
    assert changes.table_writes_of(1, 2) == [(0, 0, 10), (1, 0, 11), (0, 1, 13)]
    assert changes.table_writes_of(1, 0) == []


def test_nothing_is_told_of_a_row_that_was_given_up():
    changes = RowChanges(
        added=[NewSequence(row, [1], 1, 0, SAMPLING) for row in (1, 2)],
        forks=[Fork(5, 1, SAMPLING), Fork(1, 2, SAMPLING)],
        table_writes=[(1, 0, 0, 10), (2, 0, 0, 12)],
        token_writes=[(1, 3, 7), (2, 3, 8)],
        block_copies=[(1, 20, 21), (2, 21, 22)],
    )
    changes.drop(1)
    assert [new.row for new in changes.added] == [2]
    assert [(fork.source_row, fork.target_row) for fork in changes.forks] == [(1, 2)]
    assert (changes.table_writes, changes.token_writes) == ([(2, 0, 0, 12)], [(2, 3, 8)])
    assert changes.block_copies == [(2, 21, 22)]


def test_a_plan_has_the_decodes_first_with_their_drafts():
    plan = make_draft().plan(6, RowChanges(), num_failures=2)
    assert (plan.number, plan.num_failures, plan.num_decodes, plan.num_tokens) == (6, 2, 2, 13)
    assert (plan.rows.tolist(), plan.num_new_tokens.tolist()) == ([3, 5, 1, 2], [3, 1, 4, 5])
    assert (plan.starts.tolist(), plan.samples.tolist()) == ([7, 9, 0, 8], [True, True, True, False])
    assert (plan.table_writes.shape, plan.token_writes.shape, plan.block_copies.shape) == ((0, 4), (0, 3), (0, 2))


def test_a_plan_has_the_copies_in_order_and_not_whose_they_are():
    changes = RowChanges()
    changes.copy_blocks(3, [(20, 21), (30, 31)])
    changes.copy_blocks(1, [(20, 22)])
    assert make_draft().plan(6, changes, num_failures=0).block_copies.tolist() == [[20, 21], [30, 31], [20, 22]]


def test_tokens_are_taken_from_the_budget():
    assert make_draft().budget == 20 - 3 - 1 - 4 - 5


def test_blocks_announced_by_all_chunks_are_told():
    assert [block.block_id for block in make_draft().announced] == [40, 41, 42]


def test_a_chunk_is_never_dropped():
    with pytest.raises(AssertionError):
        make_draft().drop(2)


def test_a_dropped_decode_takes_its_drafts_along():
    draft = make_draft()
    assert not draft.has_preempted
    draft.drop(3)
    assert draft.has_preempted
    plan = draft.plan(0, RowChanges(), num_failures=0)
    assert (plan.rows.tolist(), plan.num_new_tokens.tolist(), plan.starts.tolist()) == ([5, 1, 2], [1, 4, 5], [9, 0, 8])


def test_a_draft_is_empty_until_something_is_computed():
    draft = StepDraft.empty(4)
    assert draft.is_empty
    draft.add_chunk(1, 0, 4, [], samples=True)
    assert not draft.is_empty
