"""The Triton attention backend against the torch twin, over pages where whatever no token sees is NaN."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.runtime.kernels.conftest import PagedBatch, paged_batch
from tests.runtime.kernels.triton_device import DEVICE, GPU_MARKS, TOLERANCES, on_device
from torch import Tensor

from kvasir_runtime.attention.backend import DecodeBounds, GroupInputs, LayerCache, StepInputs
from kvasir_runtime.attention.triton import TritonAttention
from kvasir_runtime.kernels.attention_tiles import HeadShape, splits_for
from kvasir_runtime.kernels.inputs import StepLengths
from kvasir_runtime.kernels.paged_attention import paged_attention_reference

pytestmark = GPU_MARKS
SMALL = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "block_size": 16}
SPLIT_KEYS, NUM_SMS = 32, 1
"""Short splits, at most four: the interpreter takes milliseconds for a tile."""


def step_inputs(batch: PagedBatch, num_decodes: int) -> StepInputs:
    query_lens = batch.query_starts.diff().numpy()
    return StepInputs(
        token_ids=torch.empty(0, dtype=torch.int64),
        positions=torch.empty(0, dtype=torch.int64),
        query_starts=on_device(batch.query_starts),
        seq_lens=on_device(batch.seq_lens),
        rows=on_device(batch.rows),
        groups=(GroupInputs(on_device(batch.block_table), torch.empty(0, dtype=torch.int64)),),
        lengths=StepLengths(query_lens, num_decodes, int(batch.seq_lens.max())),
    )


def make_backend(max_num_decodes: int = 4, max_query_len: int = 4) -> TritonAttention:
    bounds = DecodeBounds(max_num_decodes, max_query_len)
    return TritonAttention(DEVICE, bounds, num_sms=NUM_SMS, split_unit_keys=SPLIT_KEYS)


def attend(
    batch: PagedBatch,
    num_decodes: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    backend: TritonAttention | None = None,
) -> Tensor:
    step = (backend or make_backend()).prepare(step_inputs(batch, num_decodes))
    cache = LayerCache(on_device(batch.key_cache), on_device(batch.value_cache), group=0)
    out = step.attend(on_device(batch.query), cache, scale=0.25, window=window, softcap=softcap)
    return out.cpu()


def expected(batch: PagedBatch, window: int | None = None, softcap: float | None = None) -> Tensor:
    return paged_attention_reference(
        batch.query, batch.key_cache, batch.value_cache, batch.query_starts, batch.seq_lens, batch.block_table,
        batch.rows, 0.25, window, softcap, torch.empty_like(batch.query),
    )  # fmt: skip


def without_keys_behind(batch: PagedBatch, window: int) -> PagedBatch:
    """Blocks wholly behind the window become entries of a block of NaN, and so do the first keys of the next block."""
    block_size = batch.key_cache.shape[1]
    table = batch.block_table.clone()
    nowhere = int(batch.key_cache.isnan().flatten(1).all(1).nonzero()[0])
    for row, query_len, seq_len in zip(batch.rows, batch.query_starts.diff(), batch.seq_lens, strict=True):
        first = max(0, int(seq_len - query_len) - window + 1)
        partly = table[row, first // block_size]
        for cache in (batch.key_cache, batch.value_cache):
            cache[partly, : first % block_size] = torch.nan
        table[row, : first // block_size] = nowhere
    return replace(batch, block_table=table)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "window", "softcap", "dtype"),
    [
        (2, 2, 32, 16, None, None, torch.float32),
        (3, 1, 64, 8, None, None, torch.bfloat16),
        (8, 1, 24, 16, 20, None, torch.float32),
        (4, 2, 128, 32, None, 5.0, torch.bfloat16),
        (2, 1, 256, 16, 40, 30.0, torch.float32),
    ],
)
def test_agrees_over_decodes_drafts_and_prefill_chunks(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None, softcap: float | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    batch = paged_batch(
        [(1, 1), (3, 70), (1, 33), (7, 7), (40, 60)], num_heads, num_kv_heads, head_dim, block_size, dtype
    )
    if window is not None:
        batch = without_keys_behind(batch, window)
    got = attend(batch, 3, window=window, softcap=softcap)
    torch.testing.assert_close(got, expected(batch, window, softcap), **TOLERANCES[dtype])


@pytest.mark.parametrize("seq_len", [32, 33, 128, 129])
def test_agrees_at_the_bounds_of_splits(seq_len: int) -> None:
    batch = paged_batch([(1, seq_len), (2, 3)], **SMALL, dtype=torch.float32)
    torch.testing.assert_close(attend(batch, 2), expected(batch), **TOLERANCES[torch.float32])


@pytest.mark.parametrize(("seq_len", "window"), [(90, 32), (90, 33), (40, 40), (40, 39), (33, 1)])
def test_agrees_at_the_bounds_of_windows_with_nan_behind(seq_len: int, window: int) -> None:
    batch = without_keys_behind(paged_batch([(2, seq_len)], **SMALL, dtype=torch.float32), window)
    for num_decodes in (1, 0):  # as a decode with a draft, and as a prefill chunk
        got = attend(batch, num_decodes, window=window)
        torch.testing.assert_close(got, expected(batch, window), **TOLERANCES[torch.float32])


@pytest.mark.parametrize("query_len", [31, 32, 33])
def test_agrees_at_the_bounds_of_prefill_tiles(query_len: int) -> None:
    batch = paged_batch([(query_len, 64), (query_len, query_len)], **SMALL, dtype=torch.float32)
    torch.testing.assert_close(attend(batch, 0), expected(batch), **TOLERANCES[torch.float32])


def test_a_request_gets_the_same_bits_alone_and_among_others() -> None:
    batch = paged_batch([(1, 60), (1, 20), (4, 150), (9, 30)], **SMALL, dtype=torch.float32)
    backend = make_backend()
    together = attend(batch, 3, backend=backend).split(batch.query_starts.diff().tolist())
    for request, result in enumerate(together):
        alone = attend(batch.only(request), int(request < 3), backend=backend)
        assert torch.equal(alone, result), request


def test_splits_shared_by_fewer_programs_give_the_same_bits() -> None:
    batch = paged_batch([(1, 120)] + [(1, 1)] * 32, **SMALL, dtype=torch.float32)
    backend = make_backend(max_num_decodes=33)
    assert torch.equal(attend(batch, 33, backend=backend)[:1], attend(batch.only(0), 1, backend=backend))


@pytest.mark.parametrize(("dtype", "query_len"), [(torch.float32, 5), (torch.bfloat16, 9)])
def test_agrees_where_the_rows_of_a_decode_take_two_programs(dtype: torch.dtype, query_len: int) -> None:
    """Of which one has no row of the second request."""
    batch = paged_batch([(query_len, 70), (1, 33)], 15, 1, 16, 16, dtype)
    got = attend(batch, 2, backend=make_backend(max_query_len=query_len))
    torch.testing.assert_close(got, expected(batch), **TOLERANCES[dtype])


def test_layers_of_one_step_may_differ_in_all_but_their_tokens() -> None:
    """Launches are prepared once for layers that are alike."""
    lengths = [(1, 70), (2, 20), (9, 30)]
    batches = [
        paged_batch(lengths, num_heads, 1, head_dim, block_size, torch.float32, seed)
        for seed, (num_heads, head_dim, block_size) in enumerate([(2, 16, 16), (2, 16, 16), (4, 16, 16), (2, 32, 8)])
    ]
    inputs = step_inputs(batches[0], 2)
    for batch in batches[1:]:
        batch.block_table[batches[0].rows], batch.rows[:] = batch.block_table[batch.rows], batches[0].rows
    groups = [GroupInputs(on_device(batch.block_table), torch.empty(0, dtype=torch.int64)) for batch in batches]
    step = make_backend().prepare(replace(inputs, groups=tuple(groups)))
    one_head = replace(batches[0], query=batches[0].query[:, :1])  # of the same strides
    for window, softcap in ((None, None), (9, None), (None, 2.0)):
        for group, batch in [*enumerate(batches), (0, one_head)]:
            cache = LayerCache(on_device(batch.key_cache), on_device(batch.value_cache), group)
            got = step.attend(on_device(batch.query), cache, scale=0.25, window=window, softcap=softcap)
            torch.testing.assert_close(got.cpu(), expected(batch, window, softcap), **TOLERANCES[torch.float32])


def test_a_step_planned_for_longer_sequences_gives_the_same_bits() -> None:
    """As a CUDA graph does: the launch is that of the longest sequence it may ever meet."""
    batch = paged_batch([(1, 60), (1, 7)], **SMALL, dtype=torch.float32)
    inputs = step_inputs(batch, 2)
    inputs = replace(inputs, lengths=replace(inputs.lengths, max_seq_len=8192))
    cache = LayerCache(on_device(batch.key_cache), on_device(batch.value_cache), group=0)
    out = make_backend().prepare(inputs).attend(
        on_device(batch.query), cache, scale=0.25, window=None, softcap=None
    )  # fmt: skip
    assert torch.equal(out.cpu(), attend(batch, 2))


def test_padding_requests_give_zeros_and_read_nothing() -> None:
    batch = paged_batch([(2, 60), (2, 5)], **SMALL, dtype=torch.float32)
    batch.seq_lens[1], batch.rows[1] = 0, -1
    got = attend(batch, 2)
    assert not got[2:].any()
    torch.testing.assert_close(got[:2], attend(batch.only(0), 1), atol=0, rtol=0)


def test_the_workspace_is_taken_once_for_the_bounds() -> None:
    heads, backend = HeadShape(2, 1, 16), make_backend(max_num_decodes=2, max_query_len=2)
    workspace = backend.workspace(heads)
    assert backend.workspace(HeadShape(2, 1, 16)) is workspace
    num_entries = 2 * 2 * heads.num_heads * splits_for(1, NUM_SMS).max_splits
    assert workspace.values.numel() == num_entries * heads.head_dim
    assert workspace.statistics.numel() == num_entries * 2


def test_decodes_beyond_the_bounds_are_refused() -> None:
    batch = paged_batch([(1, 9), (2, 9), (1, 9)], **SMALL, dtype=torch.float32)
    backend = make_backend(max_num_decodes=2, max_query_len=2)
    with pytest.raises(ValueError, match="3 decodes of up to 2 tokens: the attention workspace holds 2 of 2"):
        backend.prepare(step_inputs(batch, 3))
    longer = replace(step_inputs(batch.only(1), 1), lengths=StepLengths(np.array([3], dtype=np.int32), 1, 9))
    with pytest.raises(ValueError, match="1 decodes of up to 3 tokens"):
        backend.prepare(longer)
