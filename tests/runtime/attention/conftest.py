"""Steps for the attention backends: requests over the pages of one byte buffer, as ranks lay it out."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import GroupInputs, LayerCache, StepInputs
from kvasir_runtime.kernels.inputs import StepLengths

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 4, 2, 8
MAX_NUM_SEQS = 6


@dataclass(frozen=True)
class Request:
    query_len: int
    seq_len: int
    row: int
    window: int | None = None
    """Of the group; blocks that lie wholly behind it belong to nobody, and their entries name a page of NaN."""

    @property
    def first_block(self) -> int:
        return 0 if self.window is None else max(0, self.seq_len - self.query_len - self.window + 1) // BLOCK_SIZE


def step_of(requests: list[Request], dtype: torch.dtype, seed: int = 0) -> tuple[StepInputs, LayerCache]:
    """Page 0 and every byte that no request has written hold NaN; unused rows and entries name page 0."""
    random = torch.Generator().manual_seed(seed)
    layer_bytes = 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    num_blocks = 1 + sum(-(-request.seq_len // BLOCK_SIZE) for request in requests)
    buffer = torch.full((num_blocks, 3 * layer_bytes // dtype.itemsize), torch.nan, dtype=dtype).view(torch.uint8)
    layer = buffer[:, layer_bytes : 2 * layer_bytes].view(dtype)
    caches = layer.unflatten(1, (2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM))
    cache = LayerCache(caches[:, 0], caches[:, 1], group=1)
    order = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()
    table = torch.zeros(MAX_NUM_SEQS, 16, dtype=torch.int32)
    slots: list[int] = []
    for request in requests:
        for block in range(request.first_block, -(-request.seq_len // BLOCK_SIZE)):
            table[request.row, block] = order.pop()
        at = [
            int(table[request.row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(request.first_block * BLOCK_SIZE, request.seq_len)
        ]
        new = at[len(at) - request.query_len :]
        for slot in at[: len(at) - request.query_len]:
            for tensor in (cache.key, cache.value):
                values = torch.randn(NUM_KV_HEADS, HEAD_DIM, generator=random, dtype=torch.float64)
                tensor[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = values.to(dtype)
        slots += new
    query_lens = [request.query_len for request in requests]
    positions = [
        position for request in requests for position in range(request.seq_len - request.query_len, request.seq_len)
    ]
    other = GroupInputs(torch.zeros_like(table), torch.full((len(slots),), -1))
    return StepInputs(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor(positions),
        query_starts=torch.tensor([0, *np.cumsum(query_lens).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor([request.seq_len for request in requests], dtype=torch.int32),
        rows=torch.tensor([request.row for request in requests], dtype=torch.int32),
        groups=(other, GroupInputs(table, torch.tensor(slots))),
        lengths=StepLengths(
            np.array(query_lens, dtype=np.int32),
            sum(query_len == 1 for query_len in query_lens),
            max(request.seq_len for request in requests),
        ),
    ), cache


def projections(num_tokens: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as views of one packed projection."""
    random = torch.Generator().manual_seed(seed)
    packed = torch.randn(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, generator=random, dtype=torch.float64)
    heads = packed.to(dtype).unflatten(1, (-1, HEAD_DIM))
    query, key, value = heads.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
    return query, key, value


def rotary_tables(num_positions: int) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** -torch.arange(0, 1, 2 / HEAD_DIM)
    angles = torch.outer(torch.arange(float(num_positions)), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
