"""What is told of rows that were given up, and of those that others are forked from, before a step is planned."""

from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import Fork, NewSequence
from kvasir_runtime.scheduling.step_draft import RowChanges

SAMPLING = SamplingParams(max_tokens=1, seed=0)


def test_table_writes_of_the_first_blocks_are_told_by_row():
    changes = RowChanges()
    changes.write_tables(1, [(0, 0, 10), (1, 0, 11), (0, 1, 13)])
    changes.write_tables(2, [(0, 0, 12)])
    assert changes.table_writes_of(1, 1) == [(0, 0, 10), (1, 0, 11)]
    assert changes.table_writes_of(1, 2) == [(0, 0, 10), (1, 0, 11), (0, 1, 13)]
    assert changes.table_writes_of(1, 0) == []


def test_nothing_is_told_of_a_row_that_was_given_up():
    changes = RowChanges(
        added=[NewSequence(row, RequestSpec(prompt_token_ids=[1], sampling=SAMPLING), [], 0) for row in (1, 2)],
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
