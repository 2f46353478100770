import numpy as np

from kvasir_runtime.engine.messages import SamplingParams
from kvasir_runtime.execution.input_batch import RequestRows
from kvasir_runtime.scheduling.batch import NewRequest, ScheduledBatch, ScheduledRequest

GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0)


def batch(
    *shares: ScheduledRequest, new: tuple[NewRequest, ...] = (), released: tuple[str, ...] = ()
) -> ScheduledBatch:
    return ScheduledBatch(released, new, shares, sum(share.num_new_tokens for share in shares))


def rows_with_two_requests() -> RequestRows:
    """`a` has 6 tokens of which 4 are computed, `b` has 3, in blocks of 4."""
    rows = RequestRows(max_num_seqs=2, max_model_len=16, block_size=4, vocab_size=100)
    new = (NewRequest("a", [10, 11, 12, 13, 14, 15], 6, GREEDY), NewRequest("b", [20, 21, 22], 3, GREEDY))
    shares = (ScheduledRequest("a", 0, 4, (7,), False), ScheduledRequest("b", 0, 3, (5,), True))
    rows.apply(batch(*shares, new=new))
    return rows


def test_lays_tokens_of_mixed_shares_end_to_end() -> None:
    rows = rows_with_two_requests()
    rows.store_sampled(np.array([1]), np.array([3]), np.array([99]))
    step = batch(ScheduledRequest("b", 3, 1, (), True), ScheduledRequest("a", 4, 2, (2,), True))
    rows.apply(step)
    inputs = rows.step_inputs(step.requests)
    assert inputs.token_ids.tolist() == [99, 14, 15]  # the sampled token is known before the scheduler tells
    assert inputs.positions.tolist() == [3, 4, 5]
    assert inputs.slots.tolist() == [5 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1]
    assert inputs.query_starts.tolist() == [0, 1, 3]
    assert inputs.seq_lens.tolist() == [4, 6]
    assert inputs.block_table.tolist() == [[5, 0], [7, 2]]
    assert (inputs.max_query_len, inputs.max_seq_len) == (2, 6)


def test_decodes_take_one_token_each() -> None:
    rows = rows_with_two_requests()
    inputs = rows.step_inputs((ScheduledRequest("a", 3, 1, (), False), ScheduledRequest("b", 2, 1, (), True)))
    assert inputs.token_ids.tolist() == [13, 22]
    assert inputs.slots.tolist() == [7 * 4 + 3, 5 * 4 + 2]


def test_a_released_row_serves_a_new_request_from_a_clean_block_table() -> None:
    rows = rows_with_two_requests()
    step = batch(
        ScheduledRequest("c", 0, 2, (9,), True), new=(NewRequest("c", [30, 31], 2, GREEDY),), released=("a", "unknown")
    )
    rows.apply(step)
    inputs = rows.step_inputs(step.requests)
    assert inputs.token_ids.tolist() == [30, 31]
    assert inputs.slots.tolist() == [36, 37]


def test_a_preempted_request_returns_with_its_output() -> None:
    rows = rows_with_two_requests()
    step = batch(
        ScheduledRequest("b", 0, 4, (1,), True), new=(NewRequest("b", [20, 21, 22, 77], 3, GREEDY),), released=("b",)
    )
    rows.apply(step)
    assert rows.step_inputs(step.requests).token_ids.tolist() == [20, 21, 22, 77]
    assert rows.num_prompt_tokens[rows.step_inputs(step.requests).rows].tolist() == [3]
