"""Greedy sampling in Triton: many programs a row, so that a batch of one uses the whole device.

Each program reduces a block to one 64-bit key, its largest number above its place, and a second kernel takes the
largest key of a row. The torch twin is `argmax_reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program looks at."""


def triton_argmax(logits: Tensor) -> Tensor:
    """As `argmax_reference`: int64 [num_rows] for logits [num_rows, vocab_size]."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    keys = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _block_argmax_kernel[(num_rows, num_blocks)](keys, logits, logits.stride(0), vocab_size, BLOCK=BLOCK, num_warps=8)
    _row_argmax_kernel[(num_rows,)](out, keys, num_blocks, PADDED=triton.next_power_of_2(num_blocks), num_warps=1)
    return out


@triton.jit
def _block_argmax_kernel(keys, logits, row_stride, vocab_size, BLOCK: tl.constexpr):
    """Program (row, block of columns)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = block_key(logits + row * row_stride, block, vocab_size, BLOCK)
    tl.store(keys + row * tl.num_programs(1) + block, key)


@triton.jit
def _row_argmax_kernel(out, keys, num_blocks, PADDED: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    key = tl.load(keys + row * num_blocks + block, mask=block < num_blocks, other=-0x8000000000000000)
    tl.store(out + row, column_of_key(tl.max(key, 0)))


@triton.jit
def block_key(logits, block, vocab_size, BLOCK: tl.constexpr):
    """The largest logit of a block, in order, above the place of the first that is as large. NaN counts as -inf."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # -0 becomes +0, since the two are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    return tl.max((ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64), 0)


@triton.jit
def column_of_key(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)
