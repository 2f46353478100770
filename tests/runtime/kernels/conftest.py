"""Paged batches for the attention kernels: requests of given lengths over shuffled blocks of one cache buffer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch


@dataclass(frozen=True)
class PagedBatch:
    query: torch.Tensor  # [T, Hq, D]
    key_cache: torch.Tensor  # [num_blocks, block_size, Hk, D], a view into the buffer of all layers
    value_cache: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    rows: torch.Tensor
    nobodys_page: int

    def only(self, request: int) -> "PagedBatch":
        """The same request without its neighbours."""
        first, end = self.query_starts[request : request + 2].tolist()
        return PagedBatch(
            query=self.query[first:end],
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            query_starts=torch.tensor([0, end - first], dtype=torch.int32),
            seq_lens=self.seq_lens[request : request + 1],
            block_table=self.block_table,
            rows=self.rows[request : request + 1],
            nobodys_page=self.nobodys_page,
        )

    def chunk(self, start: int, end: int) -> "PagedBatch":
        """Of one whole prompt: the tokens from `start` to `end`, after those before them."""
        return replace(
            self,
            query=self.query[start:end],
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
        )


def paged_batch(
    lengths: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> PagedBatch:
    """Random requests of (query_len, seq_len) each; blocks that no request owns hold NaN, so reading one shows."""
    random = torch.Generator().manual_seed(seed)
    blocks_each = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(blocks_each) + 2
    buffer = torch.randn(num_blocks, 3, 2, block_size, num_kv_heads, head_dim, generator=random).to(dtype)
    order = torch.randperm(num_blocks, generator=random).tolist()
    rows = torch.randperm(len(lengths) + 3, generator=random)[: len(lengths)].to(torch.int32)
    table = torch.full((len(lengths) + 3, max(blocks_each)), order[-1], dtype=torch.int32)
    taken = 0
    for request, count in enumerate(blocks_each):
        table[rows[request], :count] = torch.tensor(order[taken : taken + count])
        taken += count
        buffer[order[taken - 1], :, :, (lengths[request][1] - 1) % block_size + 1 :] = torch.nan
    buffer[order[taken:]] = torch.nan
    starts = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0).to(torch.int32)
    query = torch.randn(int(starts[-1]), num_heads, head_dim, generator=random).to(dtype)
    seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32)
    return PagedBatch(query, buffer[:, 1, 0], buffer[:, 1, 1], starts, seq_lens, table, rows, order[-1])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
