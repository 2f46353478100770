"""Causal attention over paged keys and values, for batches that mix prefill chunks and decodes.

Query token i of a request sits at position seq_len - query_len + i and sees the keys at or before it, or the last
`window` of them. This is plain torch; the compiled kernel is `attention.cpu.AttentionPlan`.
"""

import torch


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
