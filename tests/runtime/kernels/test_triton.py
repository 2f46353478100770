"""Triton kernels against their torch twins: on a GPU where there is one, under Triton's interpreter elsewhere."""

import os

import numpy as np
import pytest
import torch

from kvasir_runtime.kernels.activation import gelu_tanh_and_mul_reference, silu_and_mul_reference
from kvasir_runtime.kernels.activation_triton import triton_gelu_tanh_and_mul, triton_silu_and_mul
from kvasir_runtime.kernels.paged_attention import paged_attention_reference
from kvasir_runtime.kernels.paged_attention_triton import triton_paged_attention
from kvasir_runtime.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from kvasir_runtime.kernels.rms_norm_triton import triton_add_rms_norm, triton_rms_norm
from kvasir_runtime.kernels.rotary import rotary_reference
from kvasir_runtime.kernels.rotary_triton import triton_rotary
from kvasir_runtime.kernels.write_kv import write_kv_reference
from kvasir_runtime.kernels.write_kv_triton import triton_write_kv

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCES = {torch.float32: {"atol": 2e-5, "rtol": 1e-4}, torch.bfloat16: {"atol": 1.5e-2, "rtol": 1e-2}}
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Batch:
    """Requests of (query length, sequence length) over a shuffled block table in the engine's one buffer."""

    def __init__(self, lengths, *, heads, kv_heads, head_dim, page, dtype) -> None:
        num_pages = [-(-seq // page) for _, seq in lengths]
        buffer = randn(sum(num_pages) + 1, 2, 2, page, kv_heads, head_dim, dtype=dtype)
        self.key_cache, self.value_cache = buffer[:, 1, 0], buffer[:, 1, 1]
        ids = torch.from_numpy(np.random.default_rng(0).permutation(sum(num_pages) + 1))
        table = torch.zeros(len(lengths), max(num_pages), dtype=torch.int32)
        first = 0
        for row, count in enumerate(num_pages):
            table[row, :count] = ids[first : first + count]
            first += count
        self.block_table = table.to(DEVICE)
        self.query = randn(sum(query for query, _ in lengths), heads, head_dim, dtype=dtype)
        starts = [0, *np.cumsum([query for query, _ in lengths])]
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.tensor([seq for _, seq in lengths], dtype=torch.int32, device=DEVICE)
        self.longest = {"max_query_len": max(q for q, _ in lengths), "max_seq_len": max(s for _, s in lengths)}

    def inputs(self, window, softcap, out):
        return (
            self.query, self.key_cache, self.value_cache, self.query_starts, self.seq_lens, self.block_table,
            self.query.shape[2] ** -0.5, window, softcap, out,
        )  # fmt: skip


MIXED = [(1, 1), (7, 7), (1, 90), (70, 130), (1, 33), (5, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "window", "softcap"),
    [
        (4, 4, 32, 16, None, None),
        (6, 2, 64, 8, None, None),
        (8, 1, 24, 16, 20, None),
        (4, 2, 32, 32, None, 5.0),
        (12, 4, 16, 16, 40, 30.0),
    ],
)
def test_attention_agrees_over_mixed_batches(dtype, heads, kv_heads, head_dim, page, window, softcap):
    batch = Batch(MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype)
    got, expected = torch.empty_like(batch.query), torch.empty_like(batch.query)
    triton_paged_attention(*batch.inputs(window, softcap, got), **batch.longest)
    paged_attention_reference(*batch.inputs(window, softcap, expected))
    torch.testing.assert_close(got, expected, **TOLERANCES[dtype])


def test_decodes_over_several_splits_agree():
    batch = Batch([(1, 1300), (1, 3), (1, 513)], heads=4, kv_heads=2, head_dim=16, page=16, dtype=torch.float32)
    got, expected = torch.empty_like(batch.query), torch.empty_like(batch.query)
    triton_paged_attention(*batch.inputs(None, None, got), **batch.longest)
    paged_attention_reference(*batch.inputs(None, None, expected))
    torch.testing.assert_close(got, expected, **TOLERANCES[torch.float32])


def test_a_window_that_begins_in_a_later_split_agrees():
    batch = Batch([(1, 1300)], heads=2, kv_heads=1, head_dim=16, page=16, dtype=torch.float32)
    got, expected = torch.empty_like(batch.query), torch.empty_like(batch.query)
    triton_paged_attention(*batch.inputs(100, None, got), **batch.longest)
    paged_attention_reference(*batch.inputs(100, None, expected))
    torch.testing.assert_close(got, expected, **TOLERANCES[torch.float32])


def test_a_request_gets_the_same_bits_alone_and_among_others():
    lengths = [(1, 40), (9, 30), (1, 1100)]
    batch = Batch(lengths, heads=4, kv_heads=2, head_dim=16, page=16, dtype=torch.float32)
    together = torch.empty_like(batch.query)
    triton_paged_attention(*batch.inputs(None, None, together), **batch.longest)
    first = 0
    for row, (query_len, seq_len) in enumerate(lengths):
        alone = torch.empty_like(batch.query[first : first + query_len])
        triton_paged_attention(
            batch.query[first : first + query_len], batch.key_cache, batch.value_cache,
            torch.tensor([0, query_len], dtype=torch.int32, device=DEVICE), batch.seq_lens[row : row + 1],
            batch.block_table[row : row + 1], 0.25, None, None, alone, max_query_len=query_len, max_seq_len=seq_len,
        )  # fmt: skip
        assert torch.equal(alone, together[first : first + query_len])
        first += query_len


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_agrees_on_rows_and_on_strided_heads(dtype):
    weight = randn(48)
    packed = randn(5, 3, 96, dtype=dtype)
    for x in (packed[:, 0, :48], packed[:, :, 48:]):
        torch.testing.assert_close(
            triton_rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), **TOLERANCES[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_agrees_and_adds_in_place(dtype):
    x, residual, weight = randn(5, 80, dtype=dtype), randn(5, 80, dtype=dtype), randn(80, dtype=dtype)
    expected = add_rms_norm_reference(x, residual.clone(), weight, 1e-6)
    got = triton_add_rms_norm(x, residual, weight, 1e-6)
    assert got[1] is residual
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "twin"),
    [(triton_silu_and_mul, silu_and_mul_reference), (triton_gelu_tanh_and_mul, gelu_tanh_and_mul_reference)],
)
def test_gated_activations_agree(dtype, kernel, twin):
    gate_up = randn(3, 2 * 1100, dtype=dtype)
    torch.testing.assert_close(kernel(gate_up), twin(gate_up), **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [32, 20])
def test_rotary_agrees_in_place_on_packed_heads(dtype, rotary_dim):
    packed = randn(6, (4 + 2) * 32, dtype=dtype)
    angles = randn(50, rotary_dim // 2).repeat(1, 2)
    positions = torch.randint(0, 50, (6,), device=DEVICE)
    twin = packed.clone()
    for rows, kernel in ((packed, triton_rotary), (twin, rotary_reference)):
        heads = rows.view(6, 6, 32)
        kernel(heads[:, :4], heads[:, 4:], angles.cos(), angles.sin(), positions)
    torch.testing.assert_close(packed, twin, **TOLERANCES[dtype])


def test_write_kv_agrees_and_leaves_padding_unwritten():
    slots = torch.tensor([5, -1, 33, 16], device=DEVICE)
    key, value = randn(4, 2, 24), randn(4, 2, 24)
    buffers = [torch.zeros(4, 3, 2, 16, 2, 24, device=DEVICE) for _ in range(2)]
    for buffer, kernel in zip(buffers, (triton_write_kv, write_kv_reference), strict=True):
        kernel(key, value, buffer[:, 1, 0], buffer[:, 1, 1], slots)
    assert torch.equal(*buffers)
    assert buffers[0].count_nonzero() == 3 * 2 * 2 * 24
