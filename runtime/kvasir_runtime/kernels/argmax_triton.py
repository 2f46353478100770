"""Greedy sampling in Triton: many programs a row, so that a batch of one uses the whole device.

Each program reduces a block to one 64-bit key, its largest number above its place, and a second kernel takes the
largest key of a row. The torch twin is `argmax_reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def triton_argmax(logits: Tensor) -> Tensor:
    """As `argmax_reference`, NaN counting as the largest number: int64 [num_rows] for logits [num_rows, vocab_size]."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    keys = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _block_argmax_kernel[(num_rows, num_blocks)](keys, logits, logits.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=8)
    _row_argmax_kernel[(num_rows,)](out, keys, num_blocks, PADDED=triton.next_power_of_2(num_blocks), num_warps=1)
    return out


@triton.jit
def _block_argmax_kernel(keys, logits, row_stride, vocab_size, BLOCK: tl.constexpr):
    """Program (row, block of columns)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * row_stride + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # -0 becomes +0, since the two are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    ordered = tl.where(logit != logit, 0x7FFFFFFF, ordered)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)  # of equals the first
    tl.store(keys + row * tl.num_programs(1) + block, tl.max(key, 0))


@triton.jit
def _row_argmax_kernel(out, keys, num_blocks, PADDED: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    key = tl.load(keys + row * num_blocks + block, mask=block < num_blocks, other=-0x8000000000000000)
    tl.store(out + row, 0x7FFFFFFF - (tl.max(key, 0) & 0xFFFFFFFF))
