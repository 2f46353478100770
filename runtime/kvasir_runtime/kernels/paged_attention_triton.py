"""Paged attention in Triton: one kernel for prefill chunks and decodes, a second one that joins decode's splits.

A program computes a tile of queries of one request, with all query heads that share a KV head packed into its rows
(GQA packing), and walks the keys tile by tile with an online softmax (Dao et al., FlashAttention, 2022). A decode has
few rows, so its keys are cut into splits that run side by side and are joined afterwards (Flash-Decoding, 2023). Splits
have a fixed length, so a request's result does not depend on its neighbours. The torch twin is
`paged_attention_reference`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 64
"""Query rows (queries x heads of a group) of a prefill tile."""
BLOCK_KEYS = 64
SPLIT_KEYS = 512
"""Keys of one decode split."""
MIN_DOT = 16
"""Least edge of a Triton matrix product."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Arguments of `paged_attention_reference`, as they are."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    out: torch.Tensor

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.key_cache.shape[2]


@dataclass(frozen=True, slots=True)
class _Partials:
    """What the splits of decodes leave behind, float32: weighted values, maxima and sums of the softmax."""

    values: torch.Tensor  # [num_requests, num_heads, num_splits, head_dim]
    maxima: torch.Tensor  # [num_requests, num_heads, num_splits]
    sums: torch.Tensor  # [num_requests, num_heads, num_splits]


def triton_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Fill out [T, Hq, D]; arguments as of `paged_attention_reference`, and the batch's longest query and sequence."""
    inputs = _Inputs(query, key_cache, value_cache, query_starts, seq_lens, block_table, scale, window, softcap, out)
    _attend_decodes(inputs, max_seq_len)
    if max_query_len > 1:
        _attend_prefills(inputs, max_query_len)
    return out


def _attend_prefills(inputs: _Inputs, max_query_len: int) -> None:
    """Every request with more than one query token."""
    block_rows = max(BLOCK_ROWS, triton.next_power_of_2(inputs.group))
    num_tiles = triton.cdiv(max_query_len, block_rows // inputs.group)
    unused = _Partials(inputs.out, inputs.out, inputs.out)
    _launch((inputs.seq_lens.shape[0], num_tiles, inputs.key_cache.shape[2]), inputs, unused, 1, block_rows, False)


def _attend_decodes(inputs: _Inputs, max_seq_len: int) -> None:
    """Every request with one query token, in as many splits as the longest needs."""
    num_requests, num_heads, head_dim = inputs.seq_lens.shape[0], inputs.query.shape[1], inputs.query.shape[2]
    num_splits = triton.cdiv(max_seq_len, SPLIT_KEYS)
    partials = _make_partials((num_requests, num_heads, num_splits), head_dim, inputs.query.device)
    block_rows = max(MIN_DOT, triton.next_power_of_2(inputs.group))
    _launch((num_requests, 1, inputs.key_cache.shape[2] * num_splits), inputs, partials, num_splits, block_rows, True)
    if num_splits > 1:
        out = inputs.out
        _join_splits_kernel[(num_requests, num_heads)](
            out, out.stride(0), out.stride(1), partials.values, partials.maxima, partials.sums, inputs.query_starts,
            HEAD_DIM=head_dim, PADDED_DIM=triton.next_power_of_2(head_dim), NUM_SPLITS=num_splits,
            PADDED_SPLITS=triton.next_power_of_2(num_splits),
        )  # fmt: skip


def _make_partials(shape: tuple[int, int, int], head_dim: int, device: torch.device) -> _Partials:
    values = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
    maxima = torch.empty(shape, dtype=torch.float32, device=device)
    return _Partials(values, maxima, torch.empty_like(maxima))


def _launch(
    grid: tuple[int, int, int], inputs: _Inputs, partials: _Partials, num_splits: int, block_rows: int, is_decode: bool
) -> None:
    query, key_cache, table, out = inputs.query, inputs.key_cache, inputs.block_table, inputs.out
    _attention_kernel[grid](
        out, out.stride(0), out.stride(1), query, query.stride(0), query.stride(1),
        key_cache, inputs.value_cache, key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        inputs.query_starts, inputs.seq_lens, table, table.stride(0), partials.values, partials.maxima, partials.sums,
        inputs.scale, inputs.window or 0, inputs.softcap or 0.0,
        HEAD_DIM=query.shape[2], PADDED_DIM=max(MIN_DOT, triton.next_power_of_2(query.shape[2])), GROUP=inputs.group,
        BLOCK_ROWS=block_rows, BLOCK_KEYS=BLOCK_KEYS, PAGE=key_cache.shape[1], NUM_SPLITS=num_splits,
        SPLIT_KEYS=SPLIT_KEYS, IS_DECODE=is_decode, HAS_WINDOW=inputs.window is not None,
        HAS_SOFTCAP=inputs.softcap is not None,
        WIDENS=query.device.type == "cpu",  # the interpreter multiplies the bits of bfloat16 as integers
    )  # fmt: skip


@triton.jit
def _attention_kernel(
    out, out_token_stride, out_head_stride, query, query_token_stride, query_head_stride,
    key_cache, value_cache, page_stride, slot_stride, kv_head_stride,
    query_starts, seq_lens, block_table, table_stride, partial, maximum, total, scale, window, softcap,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, PAGE: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    IS_DECODE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Program (request, tile of queries, KV head and split)."""
    BLOCK_QUERIES: tl.constexpr = BLOCK_ROWS // GROUP
    request, kv_head, split = tl.program_id(0), tl.program_id(2) // NUM_SPLITS, tl.program_id(2) % NUM_SPLITS
    first_token = tl.load(query_starts + request)
    query_len = tl.load(query_starts + request + 1) - first_token
    seq_len = tl.load(seq_lens + request)
    first_query = tl.program_id(1) * BLOCK_QUERIES
    if (query_len == 1) != IS_DECODE:
        return
    if first_query >= query_len:
        return

    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    query_index = first_query + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_QUERIES * GROUP) & (query_index < query_len)
    position = seq_len - query_len + query_index
    is_dim = dims < HEAD_DIM
    row_token = (first_token + query_index).to(tl.int64)
    queries = tl.load(
        query + row_token[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :], other=0.0,
    )  # fmt: skip
    if WIDENS:
        queries = queries.to(tl.float32)

    end_key = tl.minimum(seq_len, seq_len - query_len + first_query + BLOCK_QUERIES)
    first_key = 0
    if HAS_WINDOW:  # whole tiles before the first query's window are skipped
        first_key = tl.maximum(0, seq_len - query_len + first_query - window + 1) // BLOCK_KEYS * BLOCK_KEYS
    if IS_DECODE:
        first_key = tl.maximum(first_key, split * SPLIT_KEYS)
        end_key = tl.minimum(end_key, split * SPLIT_KEYS + SPLIT_KEYS)

    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    gathered = tl.zeros([BLOCK_ROWS, PADDED_DIM], tl.float32)
    for tile in range(first_key, end_key, BLOCK_KEYS):
        key_at = tile + tl.arange(0, BLOCK_KEYS)
        is_key = key_at < end_key
        page = tl.load(block_table + request * table_stride + key_at // PAGE, mask=is_key, other=0).to(tl.int64)
        slot = page * page_stride + (key_at % PAGE) * slot_stride + kv_head * kv_head_stride
        in_cache = is_key[:, None] & is_dim[None, :]
        keys = tl.load(key_cache + slot[:, None] + dims[None, :], mask=in_cache, other=0.0)
        if WIDENS:
            keys = keys.to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        is_seen = is_key[None, :] & (key_at[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (key_at[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
        weights = tl.exp(scores - safe_max[:, None])
        shrink = tl.exp(row_max - safe_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        values = tl.load(value_cache + slot[:, None] + dims[None, :], mask=in_cache, other=0.0)
        if WIDENS:
            values = values.to(tl.float32)
        gathered = gathered * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        row_max = new_max

    if IS_DECODE and NUM_SPLITS > 1:
        place = (request * (tl.num_programs(2) // NUM_SPLITS) * GROUP + head) * NUM_SPLITS + split
        tl.store(maximum + place, row_max, mask=is_row)
        tl.store(total + place, row_sum, mask=is_row)
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], gathered, mask=is_row[:, None] & is_dim[None, :])
    else:
        result = gathered / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        tl.store(
            out + row_token[:, None] * out_token_stride + head[:, None] * out_head_stride + dims[None, :],
            result.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :],
        )  # fmt: skip


@triton.jit
def _join_splits_kernel(
    out, out_token_stride, out_head_stride, partial, maximum, total, query_starts,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (request, head): weigh each split's result by its share of the softmax's sum."""
    request, head = tl.program_id(0), tl.program_id(1)
    first_token = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) - first_token != 1:
        return
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    is_split = splits < NUM_SPLITS
    is_dim = dims < HEAD_DIM
    place = (request * tl.num_programs(1) + head) * NUM_SPLITS + splits
    maxima = tl.load(maximum + place, mask=is_split, other=float("-inf"))
    shares = tl.exp(maxima - tl.max(maxima, 0))  # 0 for splits beyond this request's keys
    totals = tl.load(total + place, mask=is_split, other=0.0)
    parts = tl.load(
        partial + place[:, None] * HEAD_DIM + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
    )
    result = tl.sum(parts * shares[:, None], 0) / tl.sum(totals * shares, 0)
    token = first_token.to(tl.int64)
    tl.store(
        out + token * out_token_stride + head * out_head_stride + dims, result.to(out.dtype.element_ty), mask=is_dim
    )
