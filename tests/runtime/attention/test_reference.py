"""Paged attention of the reference backend equals attention computed densely in float64."""

import pytest
import torch

from kvasir_runtime.attention.backend import AttentionMetadata
from kvasir_runtime.attention.reference import ReferenceAttention

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 4, 2, 8


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """One query token [num_heads, head_dim] over the keys [n, num_kv_heads, head_dim] up to its own."""
    keys, values = (x[-window:] if window else x for x in (keys, values))
    rows = []
    for head in range(NUM_HEADS):
        scores = keys[:, head // 2] @ query[head] * 0.3
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        rows.append(scores.softmax(0) @ values[:, head // 2])
    return torch.stack(rows)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0), (3, 1.0)])
def test_equals_dense_attention_for_a_chunk_beside_a_decode(window: int | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    backend = ReferenceAttention()
    lengths, new, tables = [9, 6], [4, 1], [[3, 0, 5], [2, 4, 0]]
    keys, values = (torch.randn(2, 9, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float64) for _ in range(2))
    caches = torch.full((6, 1, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), torch.nan, dtype=torch.float64)
    key_cache, value_cache = caches[:, 0, 0], caches[:, 0, 1]
    slots = [[tables[r][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(lengths[r])] for r in range(2)]
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, 4, 5], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.tensor(slots[0] + slots[1]),
        max_query_len=4,
        max_seq_len=9,
    )
    written = [torch.cat([x[r, : lengths[r]] for r in range(2)]) for x in (keys, values)]
    backend.write(*written, key_cache, value_cache, metadata)
    query = torch.randn(5, NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    out = torch.empty_like(query)
    backend.attend(query, key_cache, value_cache, metadata, scale=0.3, window=window, softcap=softcap, out=out)

    positions = [(r, lengths[r] - new[r] + i) for r in range(2) for i in range(new[r])]
    expected = [
        dense(query[t], keys[r, : p + 1], values[r, : p + 1], window, softcap) for t, (r, p) in enumerate(positions)
    ]
    torch.testing.assert_close(out, torch.stack(expected))


def test_slots_of_minus_one_are_not_written() -> None:
    key_cache = torch.zeros(1, BLOCK_SIZE, 1, 2)
    value_cache = torch.zeros(1, BLOCK_SIZE, 1, 2)
    starts, lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    metadata = AttentionMetadata(starts, lens, table, torch.tensor([-1, 1]), 2, 2)
    ReferenceAttention().write(torch.ones(2, 1, 2), torch.ones(2, 1, 2), key_cache, value_cache, metadata)
    assert key_cache[0, :, 0, 0].tolist() == [0.0, 1.0, 0.0, 0.0]
