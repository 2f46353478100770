"""Causal attention over paged keys and values, for batches that mix prefill chunks and decodes.

Query token i of a request sits at position seq_len - query_len + i and sees the keys at or before it, or the last
`window` of them. The compiled kernel cuts work by request alone, so a result does not depend on the neighbours.
"""

from ctypes import CDLL

import torch

from kvasir_runtime.kernels.linear import VARIANTS
from kvasir_runtime.kernels.native import DTYPE_CODES, keep_while_recorded

MAX_GROUP = 64
"""Query heads that share a key head: rows of one tile."""


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill out [T, Hq, Dv] for query [T, Hq, D] and caches [num_blocks, block_size, Hk, D or Dv], of which quantised
    ones have scales [num_blocks, block_size, Hk]; float32 inside.

    Request i reads row `rows[i]` of block_table. Neither table entries nor keys that no query of it sees are read.
    """
    starts = query_starts.tolist()
    for request, (row, seq_len) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        tokens = slice(starts[request], starts[request + 1])
        query_len = tokens.stop - tokens.start
        if query_len == 0:
            continue
        first = 0 if window is None else max(0, seq_len - query_len - window + 1)
        keys = _read(key_cache, key_scale, block_table[row], first, seq_len)
        values = _read(value_cache, value_scale, block_table[row], first, seq_len)
        out[tokens] = _attend(query[tokens], keys, values, scale, window, softcap).to(out.dtype)
    return out


def _read(cache: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """The cache's entries [end - first, Hk, D] of the positions from `first` on."""
    block_size = cache.shape[1]
    seen = blocks[first // block_size : -(-end // block_size)].long()
    begin = first % block_size
    entries = cache[seen] if scale is None else cache[seen].float() * scale[seen][..., None]
    return entries.flatten(0, 1)[begin : begin + end - first]


def _attend(
    query: torch.Tensor,  # [query_len, Hq, D]
    keys: torch.Tensor,  # [seq_len, Hk, D]
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // keys.shape[1]
    keys = keys.to(wide).repeat_interleave(group, dim=1)
    values = values.to(wide).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.to(wide), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key_at = torch.arange(keys.shape[0], device=query.device)
    query_at = keys.shape[0] - query.shape[0] + torch.arange(query.shape[0], device=query.device)
    distance = query_at[:, None] - key_at[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


class AttentionPlan:
    """The compiled kernel's division of one step's work, for all layers with the same heads and window.

    It reads the tensors given here again in each layer: they must not change meanwhile. Arguments are named as in
    `paged_attention_reference`; `plan_problem` tells what it cannot read. Where the processor has them, AMX tiles and
    bf16 dot products serve bfloat16 of heads that are a multiple of 32 numbers, unless forbidden.
    """

    def __init__(
        self,
        library: CDLL,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        window: int | None,
        use_amx: bool = True,
        use_dot: bool = True,
    ) -> None:
        self._library = library
        self._tensors = (query_starts, seq_lens, block_table, rows)
        use_amx = use_amx and bool(library.kvasir_linear_has(VARIANTS["amx"]))
        use_dot = use_dot and bool(library.kvasir_linear_has(VARIANTS["dot"]))
        self._plan = library.kvasir_attention_plan(
            DTYPE_CODES[query.dtype], query_starts.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(),
            block_table.stride(0), rows.data_ptr(), rows.shape[0], query.shape[1], key_cache.shape[2], query.shape[2],
            key_cache.shape[1], window or 0, use_amx, use_dot,
        )  # fmt: skip
        keep_while_recorded(self)
        library.kvasir_attention_divide(self._plan)

    def __del__(self) -> None:
        self._library.kvasir_attention_free(self._plan)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        softcap: float | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Fill out [T, Hq, D] for one layer."""
        block_stride, slot_stride, head_stride, _ = key_cache.stride()
        self._library.kvasir_attention(
            self._plan, query.data_ptr(), query.stride(0), out.data_ptr(), out.stride(0), key_cache.data_ptr(),
            value_cache.data_ptr(), block_stride, slot_stride, head_stride, scale, softcap or 0.0,
        )  # fmt: skip
        return out


def plan_problem(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> str | None:
    """Why the compiled kernel cannot read these, or None if it can."""
    _, num_heads, head_dim = query.shape
    if query.dtype not in DTYPE_CODES:
        return f"the type is {query.dtype}, expected one of {', '.join(map(str, DTYPE_CODES))}"
    if key_cache.dtype != query.dtype:
        return f"the cache holds {key_cache.dtype}, expected the query's {query.dtype}"
    if head_dim % 8 or num_heads // key_cache.shape[2] > MAX_GROUP:
        return (
            f"heads of {head_dim} numbers, {num_heads} on {key_cache.shape[2]} of keys; expected a multiple of 8, and "
            f"at most {MAX_GROUP} on one"
        )
    if query.stride()[1:] != (head_dim, 1) or key_cache.stride(3) != 1 or key_cache.stride() != value_cache.stride():
        return f"strides are {query.stride()}, {key_cache.stride()} and {value_cache.stride()}, expected adjacent heads"
    return None
