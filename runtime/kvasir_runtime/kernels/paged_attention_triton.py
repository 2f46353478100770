"""Paged attention in Triton: decodes cut into splits of their keys, prefill chunks cut into tiles of their queries.

A program computes a tile of queries of one request, with all query heads that share a KV head packed into its rows
(GQA packing), and walks the keys tile by tile with an online softmax (Dao et al., FlashAttention, 2022). A decode has
few rows, so its keys are cut into splits that run side by side and are joined afterwards (Flash-Decoding, 2023). How
many splits is known only on the device, from each sequence's length: nothing is compiled again as sequences grow, and
a CUDA graph of the launches stays right. The torch twin is `paged_attention_reference`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kvasir_runtime.kernels.attention_tiles import (
    MIN_DOT,
    SHORT_UNITS,
    HeadShape,
    Splits,
    TileShape,
    decode_tile,
    num_row_tiles,
    num_split_programs,
)
from kvasir_runtime.kernels.dependent_launch_triton import let_next_start, wait_for_previous
from kvasir_runtime.kernels.launches import Launcher

_SHORT_UNITS = tl.constexpr(SHORT_UNITS)


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Which tokens attend to which pages."""

    query_starts: Tensor  # int32 [num_requests + 1]
    seq_lens: Tensor  # int32 [num_requests]
    rows: Tensor  # int32 [num_requests], each request's row of the block table
    block_table: Tensor  # int32 [max_num_seqs, max_blocks]


@dataclass(frozen=True, slots=True)
class LayerScaling:
    """What a layer does to its scores."""

    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """What the splits of decodes leave behind: for each (token, head, split) weighted values, row max and row sum."""

    values: Tensor  # float32, flat
    statistics: Tensor  # float32, flat


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The host's part of a decode launch."""

    num_decodes: int
    query_len: int  # of the longest
    max_query_len: int  # of any step: it fixes the tile, so that a neighbour with more drafts changes nothing
    max_seq_len: int
    num_sms: int
    splits: Splits


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Launches one layer's attention: out, query, key cache and value cache, shaped as those that it was prepared for."""


def prepare_decode(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strides as the value cache's
    inputs: PagedInputs,
    scaling: LayerScaling,
    shape: DecodeShape,
    workspace: SplitWorkspace,
) -> Attend:
    """Fills out [num_tokens, num_heads, head_dim], contiguous, for the first `num_decodes` requests."""
    heads = _head_shape(query, key_cache)
    tile = decode_tile(heads, key_cache.element_size(), shape.max_query_len)
    row_tiles = num_row_tiles(heads, tile, shape.max_query_len)
    num_sharing = shape.num_decodes * heads.num_kv_heads * row_tiles
    programs = num_split_programs(shape.splits, num_sharing, shape.max_seq_len, shape.num_sms)
    cut = {"SPLIT_UNIT": shape.splits.unit_keys, "MAX_SPLITS": shape.splits.max_splits}
    decode = _decode.prepare(
        (shape.num_decodes, heads.num_kv_heads * row_tiles, programs),
        *_arguments(query, key_cache, inputs, scaling), workspace.values, workspace.statistics,
        **_constants(query, key_cache, scaling, tile), ROW_TILES=row_tiles, **cut,
    )  # fmt: skip
    if shape.splits.most(shape.max_seq_len) == 1:
        return decode
    join = _join_splits.prepare(
        (shape.num_decodes, heads.num_heads, shape.query_len),
        inputs.query_starts, inputs.seq_lens, workspace.values, workspace.statistics, scaling.window or 0,
        HEAD_DIM=heads.head_dim, PADDED_DIM=triton.next_power_of_2(heads.head_dim),
        HAS_WINDOW=scaling.window is not None, **cut,
    )  # fmt: skip

    def decode_and_join(out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        decode(out, query, key_cache, value_cache)
        join(out)

    return decode_and_join


def prepare_prefill(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strides as the value cache's
    inputs: PagedInputs,
    scaling: LayerScaling,
    tiles: Tensor,  # int32 [num_tiles, 2], request and first query token; see `prefill_tiles`
    tile: TileShape,
) -> Attend:
    """Fills out [num_tokens, num_heads, head_dim], contiguous, for the requests of the tiles."""
    heads = _head_shape(query, key_cache)
    return _prefill.prepare(
        (heads.num_kv_heads, tiles.shape[0]),
        *_arguments(query, key_cache, inputs, scaling), tiles, **_constants(query, key_cache, scaling, tile),
    )  # fmt: skip


def _head_shape(query: Tensor, key_cache: Tensor) -> HeadShape:
    return HeadShape(query.shape[1], key_cache.shape[2], query.shape[2])


def _arguments(query: Tensor, key_cache: Tensor, inputs: PagedInputs, scaling: LayerScaling) -> tuple[Any, ...]:
    """Of decode and prefill, behind a layer's own tensors."""
    return (
        *query.stride()[:2],
        *key_cache.stride()[:3],
        inputs.query_starts,
        inputs.seq_lens,
        inputs.rows,
        inputs.block_table,
        inputs.block_table.stride(0),
        scaling.scale,
        scaling.window or 0,
        scaling.softcap or 0.0,
    )


def _constants(query: Tensor, key_cache: Tensor, scaling: LayerScaling, tile: TileShape) -> dict[str, Any]:
    heads = _head_shape(query, key_cache)
    return {
        "HEAD_DIM": heads.head_dim,
        "PADDED_DIM": max(MIN_DOT, triton.next_power_of_2(heads.head_dim)),
        "GROUP": heads.group,
        "TILE_ROWS": tile.num_rows,
        "TILE_KEYS": tile.num_keys,
        "PAGE": key_cache.shape[1],
        "HAS_WINDOW": scaling.window is not None,
        "HAS_SOFTCAP": scaling.softcap is not None,
        "WIDENS": query.device.type == "cpu",  # the interpreter multiplies the bits of bfloat16 as integers
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@triton.jit
def _decode_kernel(
    out, query, key_cache, value_cache, query_token_stride, query_head_stride,
    page_stride, slot_stride, kv_head_stride, query_starts, seq_lens, table_rows, block_table, table_stride,
    scale, window, softcap, split_values, split_statistics,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    WIDENS: tl.constexpr, ROW_TILES: tl.constexpr, SPLIT_UNIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (request, KV head and tile of its rows, every n-th split)."""
    wait_for_previous()
    let_next_start()
    request, kv_head = tl.program_id(0), tl.program_id(1) // ROW_TILES
    num_heads = tl.num_programs(1) // ROW_TILES * GROUP
    first_token = tl.load(query_starts + request)
    query_len = tl.load(query_starts + request + 1) - first_token
    seq_len = tl.load(seq_lens + request)
    lowest_key, split_keys, num_splits = _cut_keys(seq_len, query_len, window, HAS_WINDOW, SPLIT_UNIT, MAX_SPLITS)
    table = block_table + tl.load(table_rows + request).to(tl.int64) * table_stride

    rows, dims = tl.program_id(1) % ROW_TILES * TILE_ROWS + tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_DIM)
    token = (first_token + rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    position = seq_len - query_len + rows // GROUP
    is_row = rows < query_len * GROUP
    in_head = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    place = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :]
    queries = tl.load(query + place, mask=in_head, other=0.0)
    for split in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        first_key = lowest_key + split * split_keys
        values, row_max, row_sum = _attend_keys(
            queries, position, key_cache + kv_head * kv_head_stride, value_cache + kv_head * kv_head_stride,
            page_stride, slot_stride, table, first_key, tl.minimum(first_key + split_keys, seq_len),
            scale, window, softcap,
            HEAD_DIM, PADDED_DIM, TILE_ROWS, TILE_KEYS, PAGE, HAS_WINDOW, HAS_SOFTCAP, WIDENS, False,
        )  # fmt: skip
        if num_splits == 1:
            target = (token * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out + target, _normalise(values, row_sum).to(out.dtype.element_ty), mask=in_head)
        else:
            entry = (token * num_heads + head) * MAX_SPLITS + split
            tl.store(split_values + entry[:, None] * HEAD_DIM + dims[None, :], values, mask=in_head)
            tl.store(split_statistics + entry * 2, row_max, mask=is_row)
            tl.store(split_statistics + entry * 2 + 1, row_sum, mask=is_row)


@triton.jit
def _join_splits_kernel(
    out, query_starts, seq_lens, split_values, split_statistics, window,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HAS_WINDOW: tl.constexpr,
    SPLIT_UNIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (request, head, query token): weigh each split's values by its part of the softmax's sum."""
    wait_for_previous()
    let_next_start()
    request, head = tl.program_id(0), tl.program_id(1)
    first_token = tl.load(query_starts + request)
    query_len = tl.load(query_starts + request + 1) - first_token
    seq_len = tl.load(seq_lens + request)
    _, _, num_splits = _cut_keys(seq_len, query_len, window, HAS_WINDOW, SPLIT_UNIT, MAX_SPLITS)
    if (num_splits == 1) | (tl.program_id(2) >= query_len):
        return
    splits, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, PADDED_DIM)
    is_split, is_dim = splits < num_splits, dims < HEAD_DIM
    token = (first_token + tl.program_id(2)).to(tl.int64)
    entry = (token * tl.num_programs(1) + head) * MAX_SPLITS + splits
    row_max = tl.load(split_statistics + entry * 2, mask=is_split, other=float("-inf"))
    row_sum = tl.load(split_statistics + entry * 2 + 1, mask=is_split, other=0.0)
    values = tl.load(
        split_values + entry[:, None] * HEAD_DIM + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
    )
    weights = tl.exp2(row_max - tl.max(row_max, 0))
    result = tl.sum(values * weights[:, None], 0) / tl.sum(row_sum * weights, 0)
    place = (token * tl.num_programs(1) + head) * HEAD_DIM + dims
    tl.store(out + place, result.to(out.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize_on_alignment=["query_starts", "seq_lens", "table_rows"])  # of a part of a step
def _prefill_kernel(
    out, query, key_cache, value_cache, query_token_stride, query_head_stride,
    page_stride, slot_stride, kv_head_stride, query_starts, seq_lens, table_rows, block_table, table_stride,
    scale, window, softcap, tiles,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    WIDENS: tl.constexpr,
):  # fmt: skip
    """Program (KV head, tile)."""
    wait_for_previous()
    let_next_start()
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(0)
    request, first_query = tl.load(tiles + 2 * tl.program_id(1)), tl.load(tiles + 2 * tl.program_id(1) + 1)
    first_token = tl.load(query_starts + request)
    query_len = tl.load(query_starts + request + 1) - first_token
    seq_len = tl.load(seq_lens + request)
    table = block_table + tl.load(table_rows + request).to(tl.int64) * table_stride

    rows, dims = tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_DIM)
    query_index = first_query + rows // GROUP
    token = (first_token + query_index).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    first_position = seq_len - query_len + first_query
    is_row = (rows < TILE_QUERIES * GROUP) & (query_index < query_len)
    in_head = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    place = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :]
    queries = tl.load(query + place, mask=in_head, other=0.0)
    lowest_key = 0
    if HAS_WINDOW:
        lowest_key = tl.maximum(0, first_position - window + 1)
    values, _, row_sum = _attend_keys(
        queries, first_position + rows // GROUP,
        key_cache + kv_head * kv_head_stride, value_cache + kv_head * kv_head_stride,
        page_stride, slot_stride, table, lowest_key, tl.minimum(first_position + TILE_QUERIES, seq_len),
        scale, window, softcap,
        HEAD_DIM, PADDED_DIM, TILE_ROWS, TILE_KEYS, PAGE, HAS_WINDOW, HAS_SOFTCAP, WIDENS, True,
    )  # fmt: skip
    place = (token * tl.num_programs(0) * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + place, _normalise(values, row_sum).to(out.dtype.element_ty), mask=in_head)


@triton.jit
def _cut_keys(
    seq_len, query_len, window, HAS_WINDOW: tl.constexpr, SPLIT_UNIT: tl.constexpr, MAX_SPLITS: tl.constexpr
):  # fmt: skip
    """(first key that a decode sees, keys of a split, number of splits); counts as `Splits` does."""
    lowest_key = seq_len * 0
    if HAS_WINDOW:
        lowest_key = tl.maximum(0, seq_len - query_len - window + 1)
    num_keys = seq_len - lowest_key
    longer = 1 + (num_keys > _SHORT_UNITS * SPLIT_UNIT).to(tl.int32)
    num_units = tl.maximum(1, tl.cdiv(num_keys, longer * SPLIT_UNIT * MAX_SPLITS)) * longer
    split_keys = num_units * SPLIT_UNIT  # a product, so that Triton knows what keys are multiples of
    return lowest_key, split_keys, tl.maximum(1, tl.cdiv(num_keys, split_keys))


@triton.jit
def _attend_keys(
    queries, position, key_cache, value_cache, page_stride, slot_stride, table, first_key, end_key,
    scale, window, softcap,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDENS: tl.constexpr,
    LEAVES_OUT_MASKS: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys first_key..end_key - 1: (weighted values, row max, row sum), in powers of two.

    Keys outside the range are never loaded: a page behind the window, or past the end, may hold NaN. With
    `LEAVES_OUT_MASKS` the tiles whose keys all rows see are walked without asking key by key: the same numbers, sooner.
    """
    if WIDENS:
        queries = queries.to(tl.float32)
    row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    gathered = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    first_full, end_full = first_key, first_key
    if LEAVES_OUT_MASKS:
        if HAS_WINDOW:  # the first tile without a key that the last row's window leaves out
            num_cut = tl.maximum(0, tl.max(position, 0) - window + 1 - first_key)
            first_full = first_key + tl.cdiv(num_cut, TILE_KEYS) * TILE_KEYS
        num_seen = tl.minimum(end_key, tl.min(position, 0) + 1) - first_full
        end_full = first_full + tl.maximum(0, num_seen // TILE_KEYS) * TILE_KEYS
        if HAS_WINDOW:
            for tile in range(first_key, tl.minimum(first_full, end_key), TILE_KEYS):
                gathered, row_max, row_sum = _attend_tile(
                    gathered, row_max, row_sum, queries, position, key_cache, value_cache, page_stride, slot_stride,
                    table, tile, end_key, scale, window, softcap,
                    HEAD_DIM, PADDED_DIM, TILE_KEYS, PAGE, HAS_WINDOW, HAS_SOFTCAP, WIDENS, True,
                )  # fmt: skip
        for tile in range(first_full, end_full, TILE_KEYS):
            gathered, row_max, row_sum = _attend_tile(
                gathered, row_max, row_sum, queries, position, key_cache, value_cache, page_stride, slot_stride,
                table, tile, end_key, scale, window, softcap,
                HEAD_DIM, PADDED_DIM, TILE_KEYS, PAGE, HAS_WINDOW, HAS_SOFTCAP, WIDENS, False,
            )  # fmt: skip
    for tile in range(end_full, end_key, TILE_KEYS):
        gathered, row_max, row_sum = _attend_tile(
            gathered, row_max, row_sum, queries, position, key_cache, value_cache, page_stride, slot_stride,
            table, tile, end_key, scale, window, softcap,
            HEAD_DIM, PADDED_DIM, TILE_KEYS, PAGE, HAS_WINDOW, HAS_SOFTCAP, WIDENS, True,
        )  # fmt: skip
    return gathered, row_max, row_sum


@triton.jit
def _attend_tile(
    gathered, row_max, row_sum, queries, position, key_cache, value_cache, page_stride, slot_stride,
    table, tile, end_key, scale, window, softcap,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE_KEYS: tl.constexpr,
    PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDENS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The three after the keys `tile` to `tile + TILE_KEYS` - 1, of which, unless `MASKED`, each row sees each."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    dims = tl.arange(0, PADDED_DIM)
    key_at = tile + tl.arange(0, TILE_KEYS)
    in_head = (dims < HEAD_DIM)[None, :]
    if MASKED:
        is_key = key_at < end_key
        page = tl.load(table + key_at // PAGE, mask=is_key, other=0).to(tl.int64)
        in_cache = is_key[:, None] & in_head
    else:
        page = tl.load(table + key_at // PAGE).to(tl.int64)
        in_cache = in_head
    slot = page * page_stride + (key_at % PAGE) * slot_stride
    keys = tl.load(key_cache + slot[:, None] + dims[None, :], mask=in_cache, other=0.0)
    values = tl.load(value_cache + slot[:, None] + dims[None, :], mask=in_cache, other=0.0)
    if WIDENS:
        keys, values = keys.to(tl.float32), values.to(tl.float32)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if HAS_SOFTCAP:
        scores = (softcap * LOG2_E) * (2.0 * tl.sigmoid(2.0 * scale * scores / softcap) - 1.0)  # tanh
    else:
        scores *= scale * LOG2_E
    if MASKED:
        is_seen = is_key[None, :] & (key_at[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (key_at[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        safe_max = new_max
    weights = tl.exp2(scores - safe_max[:, None])
    rescale = tl.exp2(row_max - safe_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    gathered = tl.dot(weights.to(values.dtype), values, gathered * rescale[:, None], input_precision="ieee")
    return gathered, new_max, row_sum


@triton.jit
def _normalise(values, row_sum):
    """A row that saw no key (padding) gives zeros."""
    return values / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


_decode = Launcher(_decode_kernel, starts_early=True)
_join_splits = Launcher(_join_splits_kernel, starts_early=True)
_prefill = Launcher(_prefill_kernel, starts_early=True)
