"""What is sent to the ranks about rows that were given up, and about those that others are forked from."""

from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.running_rows import PendingUpdates
from kvasir_runtime.scheduling.step import Fork, NewSequence

SAMPLING = SamplingParams(max_tokens=1, seed=0)


def test_table_writes_of_the_first_blocks_of_a_row():
    pending = PendingUpdates()
    pending.write_tables(1, [(0, 0, 10), (1, 0, 11), (0, 1, 13)])
    pending.write_tables(2, [(0, 0, 12)])
    assert pending.table_writes_of(1, 1) == [(0, 0, 10), (1, 0, 11)]
    assert pending.table_writes_of(1, 2) == [(0, 0, 10), (1, 0, 11), (0, 1, 13)]
    assert pending.table_writes_of(1, 0) == []


def test_nothing_is_sent_about_a_row_that_was_given_up():
    pending = PendingUpdates(
        added=[NewSequence(row, RequestSpec(prompt_token_ids=[1], sampling=SAMPLING), [], 0) for row in (1, 2)],
        forks=[Fork(5, 1, SAMPLING), Fork(1, 2, SAMPLING)],
        table_writes=[(1, 0, 0, 10), (2, 0, 0, 12)],
        token_writes=[(1, 3, 7), (2, 3, 8)],
        block_copies=[(1, 20, 21), (2, 21, 22)],
    )
    pending.drop(1)
    assert [new.row for new in pending.added] == [2]
    assert [(fork.source_row, fork.target_row) for fork in pending.forks] == [(1, 2)]
    assert (pending.table_writes, pending.token_writes) == ([(2, 0, 0, 12)], [(2, 3, 8)])
    assert pending.block_copies == [(2, 21, 22)]
