"""Inputs and positions of a step, and what a steady decode uploads for them."""

from typing import Any

import numpy as np
import pytest

from kvasir_runtime.execution.step_inputs import SampledPositionsBuilder, StepInputBuilder
from kvasir_runtime.kernels.step_ops import cpu_step_ops
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import Fork


@pytest.fixture
def rows(make_rows: Any, make_plan: Any, new_sequence: Any) -> Any:
    """Rows 0 to 2 know four tokens and have computed three, row 3 knows eight and has computed none."""
    rows = make_rows(num_groups=2)
    added = [new_sequence(row, [10 * row + i for i in range(4)], computed=3) for row in range(3)]
    tables = [
        (row, group, index, 20 * group + 4 * row + index) for row in range(4) for group in (0, 1) for index in (0, 1)
    ]
    rows.apply(make_plan(added=[*added, new_sequence(3, range(40, 48))], tables=tables))
    return rows


def builders(rows: Any, transfers: Any) -> tuple[StepInputBuilder, SampledPositionsBuilder]:
    inputs = StepInputBuilder(rows, cpu_step_ops().prepare_inputs, 32, transfers)
    return inputs, SampledPositionsBuilder(rows, transfers)


def test_inputs_of_a_mixed_step(rows: Any, make_plan: Any, transfers: Any) -> None:
    inputs = builders(rows, transfers)[0].build(
        make_plan(decodes=[(2, 1), (0, 1)], starts=[5, 3], chunks=[(3, 0, 3, False)])
    )
    assert inputs.token_ids.tolist() == [23, 3, 40, 41, 42]
    assert inputs.positions.tolist() == [3, 3, 0, 1, 2]
    assert [group.slots.tolist() for group in inputs.groups] == [[35, 3, 48, 49, 50], [115, 83, 128, 129, 130]]
    assert inputs.groups[1].block_table.data_ptr() == rows.block_tables[1].data_ptr()
    assert inputs.query_starts.tolist() == [0, 1, 2, 5]
    assert inputs.seq_lens.tolist() == [4, 4, 3]
    assert inputs.rows.tolist() == [2, 0, 3]
    assert inputs.lengths.query_lens.tolist() == [1, 1, 3]
    assert (inputs.lengths.num_decodes, inputs.lengths.max_seq_len) == (2, 6)  # the bound, not what the rows hold


def test_drafts_that_are_missing_shorten_a_decode(rows: Any, make_plan: Any, transfers: Any) -> None:
    rows.drafts[0, 0] = 77
    inputs_of, positions_of = builders(rows, transfers)
    plan = make_plan(decodes=[(0, 3), (1, 3)], chunks=[(3, 0, 2, True)])
    inputs = inputs_of.build(plan)
    assert inputs.token_ids.tolist() == [3, 77, 13, 40, 41]
    assert inputs.lengths.query_lens.tolist() == [2, 1, 2]
    positions = positions_of.build(plan, inputs.lengths.query_lens)
    assert positions.tokens.tolist() == [0, 1, 2, 4]
    assert positions.rows_of.tolist() == [0, 0, 1, 3]
    assert positions.num_earlier.tolist() == [0, 1, 0, 0]
    assert positions.starts.tolist() == [0, 2, 3, 4]
    assert positions.width == 2


def test_only_what_samples_has_positions(rows: Any, make_plan: Any, transfers: Any) -> None:
    plan = make_plan(decodes=[(1, 1)], chunks=[(3, 0, 2, False), (0, 0, 2, True)])
    positions = builders(rows, transfers)[1].build(plan, plan.num_new_tokens)
    assert positions.requests.tolist() == [0, 2]
    assert positions.rows.tolist() == [1, 0]
    assert positions.tokens.tolist() == [0, 4]


def test_a_steady_decode_uploads_nothing_but_new_blocks(rows: Any, make_plan: Any, transfers: Any) -> None:
    inputs_of, positions_of = builders(rows, transfers)
    for step in range(4):
        tables = [(0, 0, 3, 9)] if step == 3 else []
        plan = make_plan(decodes=[(0, 1), (1, 1)], starts=[3 + step] * 2, tables=tables)
        if step == 1:
            transfers.uploads.clear()
        rows.apply(plan)
        inputs_of.build(plan)
        positions_of.build(plan, plan.num_new_tokens)
    assert transfers.uploads == [16]
    assert transfers.downloads == []


@pytest.mark.parametrize(
    "change",
    [
        {"decodes": [(1, 1), (0, 1)]},
        {"decodes": [(0, 1)]},
        {"decodes": [(0, 2), (1, 1)]},
        {"decodes": [(0, 1)], "chunks": [(1, 0, 1, True)]},
        {"decodes": [(0, 1)], "chunks": [(1, 0, 1, False)]},
    ],
    ids=str,
)
def test_what_changes_is_laid_out_again(change: Any, rows: Any, make_plan: Any, transfers: Any) -> None:
    rows.drafts[0] = 5
    inputs_of, positions_of = builders(rows, transfers)
    for plan in (make_plan(decodes=[(0, 1), (1, 1)]), make_plan(**change)):
        inputs = inputs_of.build(plan)
        positions = positions_of.build(plan, inputs.lengths.query_lens)
    fresh_inputs_of, fresh_positions_of = builders(rows, transfers)
    expected = fresh_inputs_of.build(plan)
    assert inputs.token_ids.tolist() == expected.token_ids.tolist()
    assert inputs.rows.tolist() == expected.rows.tolist()
    fresh = fresh_positions_of.build(plan, expected.lengths.query_lens)
    np.testing.assert_array_equal(positions.host_tokens, fresh.host_tokens)
    assert positions.rows.tolist() == fresh.rows.tolist()
    assert positions.starts.tolist() == fresh.starts.tolist()


def test_new_parameters_of_a_row_lay_the_step_out_again(
    rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    _, positions_of = builders(rows, transfers)
    plan = make_plan(decodes=[(0, 1), (1, 1)])
    assert positions_of.build(plan, plan.num_new_tokens).random is None
    rows.apply(make_plan(added=[new_sequence(1, [1, 2], temperature=1.0)]))
    random = positions_of.build(plan, plan.num_new_tokens).random
    assert random is not None
    assert random.index.tolist() == [1]
    rows.apply(make_plan(forks=[Fork(1, 0, SamplingParams(max_tokens=8, seed=0))]))
    random = positions_of.build(plan, plan.num_new_tokens).random
    assert random is not None
    assert random.index.tolist() == [0, 1]
