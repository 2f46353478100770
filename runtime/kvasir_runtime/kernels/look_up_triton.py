"""A draw from a distribution, in one Triton kernel of many programs a row; the torch twin is `look_up_reference`.

Each program adds up a block, and the last that is done with a row finds the block of the draw, and in it the token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir_runtime.kernels.top_k_top_p import FIXED_POINT

_BLOCK = 2048
_SCALE = tl.constexpr(FIXED_POINT)


class TritonLookUp:
    """As `look_up_reference`. Owns counters, so calls follow each other on one stream."""

    def __init__(self) -> None:
        self._num_done: Tensor | None = None
        """int32 [n], programs that are done with a row; 0 between calls."""

    def __call__(self, scaled: Tensor, cut: Tensor, draws: Tensor) -> Tensor:
        num_rows, vocab_size = scaled.shape
        num_blocks = triton.cdiv(vocab_size, _BLOCK)
        if self._num_done is None or self._num_done.shape[0] < num_rows:
            self._num_done = torch.zeros(num_rows, dtype=torch.int32, device=scaled.device)
        sums = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=scaled.device)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=scaled.device)
        _look_up_kernel[(num_rows, num_blocks)](
            token_ids, scaled, scaled.stride(0), vocab_size, cut, draws, sums, self._num_done,
            NUM_BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        return token_ids


@triton.jit
def _look_up_kernel(
    token_ids, scaled, row_stride, vocab_size, cut, draws, sums, num_done,
    NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    scaled, least = scaled + row * row_stride, tl.load(cut + row)
    tl.store(sums + row * num_blocks + block, tl.sum(_amounts(scaled, least, block, vocab_size, BLOCK), 0))
    tl.debug_barrier()  # the sum is stored by whichever thread before another counts it
    if tl.atomic_add(num_done + row, 1) == num_blocks - 1:
        tl.store(num_done + row, 0)
        blocks = tl.arange(0, NUM_BLOCKS)
        own = tl.load(sums + row * num_blocks + blocks, mask=blocks < num_blocks, other=0, cache_modifier=".cg")
        total, upto = tl.sum(own, 0), tl.cumsum(own, 0)
        target = (tl.load(draws + row) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        chosen = tl.sum((upto <= target).to(tl.int32), 0)
        before = tl.sum(tl.where(blocks < chosen, own, 0), 0)
        inner = tl.cumsum(_amounts(scaled, least, chosen, vocab_size, BLOCK), 0)
        token_id = chosen * BLOCK + tl.sum((inner <= target - before).to(tl.int32), 0)
        tl.store(token_ids + row, tl.where(total > 0, token_id, 0).to(tl.int64))


@triton.jit
def _amounts(scaled, least, block, vocab_size, BLOCK: tl.constexpr):
    column = block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(scaled + column, mask=column < vocab_size, other=float("-inf"))
    return (tl.where(own >= least, tl.exp(own), 0.0) * _SCALE).to(tl.int64)  # a NaN is not kept
