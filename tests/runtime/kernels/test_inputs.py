"""A step's inputs from the rows: the compiled kernel and its torch twin lay out the same tokens."""

import pytest
import torch

from kvasir_runtime.kernels.inputs import (
    InputBuffers,
    PlannedTokens,
    PrepareInputs,
    RowTensors,
    prepare_inputs_reference,
)
from kvasir_runtime.kernels.step_ops import cpu_step_ops, reference_step_ops

BLOCK_SIZE = 4
KERNELS = {"compiled": cpu_step_ops(), "torch": reference_step_ops(drops_missing_drafts=True)}


@pytest.fixture(params=KERNELS.values(), ids=KERNELS)
def prepare_inputs(request: pytest.FixtureRequest) -> PrepareInputs:
    return request.param.prepare_inputs


def state() -> RowTensors:
    """Three rows of 16 known tokens (100 * row + position) in two groups; row 1 has two drafts, row 2 one of two."""
    return RowTensors(
        token_ids=torch.arange(17, dtype=torch.int32) + 100 * torch.arange(3, dtype=torch.int32).unsqueeze(1),
        num_computed=torch.tensor([4, 6, 9], dtype=torch.int32),
        drafts=torch.tensor([[-1, -1], [71, 72], [81, -1]], dtype=torch.int32),
        block_tables=torch.tensor(
            [[[9, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], [[20, 21, 22, 23], [24, 25, 26, 27], [28, 29, 30, 31]]],
            dtype=torch.int32,
        ),
    )


def planned(rows: list[int], lengths: list[int], num_decodes: int) -> PlannedTokens:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PlannedTokens(
        torch.tensor(rows, dtype=torch.int32), starts, num_decodes, int(starts[-1]), max(lengths, default=0)
    )


def buffers(max_tokens: int = 16) -> InputBuffers:
    return InputBuffers(
        token_ids=torch.full((max_tokens,), -7),
        positions=torch.full((max_tokens,), -7),
        slots=torch.full((2, max_tokens), -7),
        query_starts=torch.full((5,), -7, dtype=torch.int32),
        seq_lens=torch.full((4,), -7, dtype=torch.int32),
    )


def test_decodes_start_at_their_rows_and_chunks_follow(prepare_inputs: PrepareInputs) -> None:
    out = buffers()
    prepare_inputs(state(), planned([2, 0], [1, 3], num_decodes=1), BLOCK_SIZE, out)
    assert out.token_ids[:5].tolist() == [209, 4, 5, 6, -7]
    assert out.positions[:4].tolist() == [9, 4, 5, 6]
    assert out.slots[:, :4].tolist() == [[41, 4, 5, 6], [121, 84, 85, 86]]
    assert out.query_starts[:3].tolist() == [0, 1, 4]
    assert out.seq_lens[:2].tolist() == [10, 7]


def test_drafts_follow_the_last_known_token(prepare_inputs: PrepareInputs) -> None:
    out = buffers()
    prepare_inputs(state(), planned([1], [3], num_decodes=1), BLOCK_SIZE, out)
    assert out.token_ids[:3].tolist() == [106, 71, 72]
    assert out.slots[0, :3].tolist() == [22, 23, 24]
    assert out.seq_lens[:1].tolist() == [9]


def test_missing_drafts_are_not_computed(prepare_inputs: PrepareInputs) -> None:
    out = buffers()
    prepare_inputs(state(), planned([0, 2, 1], [3, 3, 2], num_decodes=3), BLOCK_SIZE, out)
    assert out.query_starts[:4].tolist() == [0, 1, 3, 5]
    assert out.token_ids[:6].tolist() == [4, 209, 81, 106, 71, -7]
    assert out.seq_lens[:3].tolist() == [5, 11, 8]


def test_a_prefill_chunk_ignores_drafts(prepare_inputs: PrepareInputs) -> None:
    out = buffers()
    prepare_inputs(state(), planned([1], [2], num_decodes=0), BLOCK_SIZE, out)
    assert out.token_ids[:2].tolist() == [106, 107]


def test_where_shapes_must_stay_a_missing_draft_is_token_0() -> None:
    out = buffers()
    prepare_inputs_reference(
        state(), planned([2, 0], [3, 2], num_decodes=1), BLOCK_SIZE, out, drops_missing_drafts=False
    )
    assert out.token_ids[:5].tolist() == [209, 81, 0, 4, 5]
    assert out.query_starts[:3].tolist() == [0, 3, 5]
    assert out.seq_lens[:2].tolist() == [12, 6]
