"""Which tokens are counted for penalties, and when."""

from collections.abc import Callable
from typing import Any

import pytest

from kvasir_runtime.execution.penalties import Penalties
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import Fork, StepPlan


def counting(rows: Rows, transfers: Transfers) -> Callable[[StepPlan], None]:
    feature = Penalties(rows, transfers)

    def apply(plan: StepPlan) -> None:
        rows.apply(plan)
        feature.on_rows(plan)

    return apply


@pytest.mark.parametrize("params", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}], ids=str)
def test_penalised_sequences_are_counted(
    params: dict[str, Any], make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows()
    apply = counting(rows, transfers)
    apply(make_plan(added=[new_sequence(0, [1, 2, 2, 4, 4, 1], prompt=3, **params), new_sequence(1, [1, 2])]))
    apply(make_plan(forks=[Fork(0, 2, SamplingParams(max_tokens=8, seed=1, **params))], tokens=[(2, 6, 5)]))
    for row, expected in ((0, {1: 1, 4: 2}), (1, {}), (2, {1: 1, 4: 2, 5: 1})):
        counts = rows.penalty_counts.in_output[row]
        assert {token: int(counts[token]) for token in counts.nonzero().flatten().tolist()} == expected
    assert rows.penalty_counts.in_prompt.nonzero().tolist() == [[0, 1], [0, 2], [2, 1], [2, 2]]


def test_the_first_output_token_written_counts(
    make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows()
    apply = counting(rows, transfers)
    apply(make_plan(added=[new_sequence(0, [1, 2], presence_penalty=1.0)], tokens=[(0, 2, 7)]))
    assert rows.penalty_counts.in_output[0].nonzero().tolist() == [[7]]


def test_a_rows_counts_begin_anew(make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any) -> None:
    rows = make_rows()
    apply = counting(rows, transfers)
    for tokens in ([1, 2, 3], [5, 6, 3]):
        apply(make_plan(added=[new_sequence(0, tokens, prompt=2, presence_penalty=1.0)]))
    assert rows.penalty_counts.in_prompt[0].nonzero().tolist() == [[5], [6]]
    assert rows.penalty_counts.in_output[0].nonzero().tolist() == [[3]]
    assert int(rows.penalty_counts.in_output[0, 3]) == 1
