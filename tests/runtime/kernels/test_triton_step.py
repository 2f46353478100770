"""The Triton kernels around the decoder, inputs and sampling, against their torch twins."""

import pytest
import torch
from tests.runtime.kernels.triton_device import DEVICE, GPU_MARKS, on_device
from torch import Tensor

from kvasir_runtime.kernels.argmax_triton import triton_argmax
from kvasir_runtime.kernels.inputs import (
    DecodeTensors,
    InputBuffers,
    PlannedTokens,
    RowTensors,
    load_inputs_reference,
    prepare_inputs_reference,
)
from kvasir_runtime.kernels.inputs_triton import triton_load_inputs, triton_prepare_inputs
from kvasir_runtime.kernels.sample import argmax_reference

pytestmark = GPU_MARKS
NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, MAX_DRAFTS = 5, 700, 16, 3


def rows_of_state(seed: int) -> RowTensors:
    random = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, 99, (NUM_ROWS, MAX_DRAFTS), generator=random, dtype=torch.int32)
    drafts[1, 1:] = -1
    return RowTensors(
        token_ids=torch.randint(100, 999, (NUM_ROWS, MAX_MODEL_LEN + 1), generator=random, dtype=torch.int32),
        num_computed=torch.tensor([0, 31, 32, 47, 600], dtype=torch.int32),
        drafts=drafts,
        block_tables=torch.randint(0, 77, (2, NUM_ROWS, MAX_MODEL_LEN // BLOCK_SIZE + 1), generator=random).int(),
    )


def prepared(kernel: str, state: RowTensors, rows: list[int], lengths: list[int], num_decodes: int) -> list[Tensor]:
    """The kernel's outputs on the CPU, behind which -7 stands."""
    device = DEVICE if kernel == "triton" else torch.device("cpu")
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    planned = PlannedTokens(
        torch.tensor(rows, dtype=torch.int32, device=device), starts.to(device), num_decodes, int(starts[-1]),
        max(lengths),
    )  # fmt: skip
    out = InputBuffers(
        token_ids=torch.full((600,), -7, device=device),
        positions=torch.full((600,), -7, device=device),
        slots=torch.full((2, 600), -7, device=device),
        query_starts=torch.full((8,), -7, dtype=torch.int32, device=device),
        seq_lens=torch.full((8,), -7, dtype=torch.int32, device=device),
    )
    if kernel == "triton":
        on_gpu = RowTensors(
            *(on_device(t) for t in (state.token_ids, state.num_computed, state.drafts, state.block_tables))
        )
        triton_prepare_inputs(on_gpu, planned, BLOCK_SIZE, out)
    else:
        prepare_inputs_reference(state, planned, BLOCK_SIZE, out, drops_missing_drafts=False)
    return [t.cpu() for t in (out.token_ids, out.positions, out.slots, out.query_starts, out.seq_lens)]


@pytest.mark.parametrize(
    ("rows", "lengths", "num_decodes"),
    [
        pytest.param([2, 0, 4], [1, 1, 1], 3, id="decodes"),
        pytest.param([1, 3], [4, 4], 2, id="drafts, some of them missing"),
        pytest.param([3, 0, 2], [2, 513, 1], 1, id="prefill chunks longer than a program's block"),
    ],
)
def test_inputs_are_the_twins(rows: list[int], lengths: list[int], num_decodes: int) -> None:
    state = rows_of_state(seed=1)
    got = prepared("triton", state, rows, lengths, num_decodes)
    for ours, theirs in zip(got, prepared("torch", state, rows, lengths, num_decodes), strict=True):
        assert torch.equal(ours, theirs)


def test_a_row_without_drafts_needs_no_room_for_them() -> None:
    state = rows_of_state(seed=2)
    bare = RowTensors(state.token_ids, state.num_computed, state.drafts[:, :0], state.block_tables)
    got = prepared("triton", bare, [3, 1], [1, 5], 1)
    for ours, theirs in zip(got, prepared("torch", bare, [3, 1], [1, 5], 1), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("graph", [(3, 3), (6, 14), (300, 600)], ids=str)
def test_what_a_graph_is_given_is_the_twins(graph: tuple[int, int]) -> None:
    lengths = torch.tensor([1] * 3 if graph[0] == graph[1] else [1, 4, 2])
    step = decode_tensors(len(lengths), int(lengths.sum()), first=1)
    step.query_starts[1:] = lengths.cumsum(0)
    found = []
    for load in (load_inputs_reference, triton_load_inputs):
        own = decode_tensors(*graph, first=10_000)
        load(step, own)
        found.append((own.token_ids, own.positions, *own.slots, own.query_starts, own.seq_lens, own.rows))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def decode_tensors(num_requests: int, num_tokens: int, first: int) -> DecodeTensors:
    longs = torch.arange(first, first + 4 * num_tokens, device=DEVICE).view(4, -1)
    ints = torch.arange(3 * num_requests, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(num_requests + 1, dtype=torch.int32, device=DEVICE)
    seq_lens, rows = ints[:num_requests] + first, ints[-num_requests:] + first
    return DecodeTensors(
        longs[0].clone(), longs[1].clone(), (longs[2].clone(), longs[3].clone()), starts, seq_lens, rows
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = torch.randn(7, 9000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, [4095, 4096, 8999]] = 50.0
    logits[1] = float("-inf")
    logits[2] = -3.0
    logits[3, 8999] = 50.0
    logits[4] = -1.0
    logits[4, [6, 5000]] = torch.tensor([-0.0, 0.0], dtype=dtype)
    logits[5, [3, 17]] = float("inf")
    logits[6, [11, 12]] = float("nan")
    assert triton_argmax(on_device(logits)).tolist() == argmax_reference(logits).tolist()
