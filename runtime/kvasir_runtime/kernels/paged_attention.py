"""Causal attention over paged keys and values, for batches that mix prefill chunks and decodes.

Query token i of a request sits at position seq_len - query_len + i and sees the keys at or before it, or the last
`window` of them. The compiled kernel cuts work by request alone, so a result does not depend on the neighbours.
"""

from collections.abc import Callable
from ctypes import CDLL

import torch

from kvasir_runtime.kernels.linear_weight import VARIANTS
from kvasir_runtime.kernels.native import DTYPE_CODES


def paged_attention_reference(
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
) -> torch.Tensor:
    """Fill out [T, Hq, D] for query [T, Hq, D] and caches [num_blocks, block_size, Hk, D]; float32 inside."""
    starts = query_starts.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        num_blocks = -(-seq_len // key_cache.shape[1])
        blocks = block_table[request, :num_blocks].long()
        keys = key_cache[blocks].flatten(0, 1)[:seq_len]
        values = value_cache[blocks].flatten(0, 1)[:seq_len]
        out[rows] = _attend(query[rows], keys, values, scale, window, softcap).to(out.dtype)
    return out


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


def cpu_paged_attention(library: CDLL, use_amx: bool = True) -> Callable[..., torch.Tensor]:
    """The compiled kernel, with the reference's arguments; what it cannot read (other types) goes to the reference."""
    native = library.kvasir_attention
    use_amx = use_amx and bool(library.kvasir_linear_has(VARIANTS["amx"]))

    def paged_attention(
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
    ) -> torch.Tensor:
        _, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        code = DTYPE_CODES.get(query.dtype)
        adjacent = query.stride(1) == head_dim and out.stride(1) == head_dim and key_cache.stride(3) == 1
        fits = adjacent and key_cache.dtype == query.dtype and head_dim % 8 == 0 and num_heads // num_kv_heads <= 64
        if code is None or not fits:
            return paged_attention_reference(
                *(query, key_cache, value_cache, query_starts, seq_lens, block_table, scale, window, softcap, out)
            )
        native(
            *(code, query.data_ptr(), query.stride(0), out.data_ptr(), out.stride(0)),
            *(key_cache.data_ptr(), value_cache.data_ptr(), *key_cache.stride()[:3]),
            *(query_starts.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(), block_table.stride(0)),
            *(seq_lens.shape[0], num_heads, num_kv_heads, head_dim, block_size),
            *(scale, window or 0, softcap or 0.0, use_amx),
        )
        return out

    return paged_attention
