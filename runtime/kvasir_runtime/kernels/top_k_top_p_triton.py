"""Where top_k and top_p cut, in Triton and without a sort; the torch twin is `least_likely_kept_reference`.

The cut is the least logit v of the row for which the tokens above v count less than k (weigh less than p of the
total). It is found by bisection over the floats in their order as integers; every pass over the row narrows the bounds
to logits that are there, so about 15 passes do, and 32 at most.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def triton_least_likely_kept(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """As `least_likely_kept_reference`; a row that keeps all may get minus infinity."""
    num_rows, vocab_size = logits.shape
    cut = torch.empty((num_rows, 1), dtype=torch.float32, device=logits.device)
    _least_likely_kept_kernel[(num_rows,)](
        cut, logits, logits.stride(0), vocab_size, top_k, top_p,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)), num_warps=16,
    )  # fmt: skip
    return cut


@triton.jit
def _least_likely_kept_kernel(cut, logits, row_stride, vocab_size, top_k, top_p, BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    least = tl.full([], -0x7F800001, tl.int32)  # minus infinity, in order
    if k < vocab_size:
        least = _bisect(logits, vocab_size, least, k.to(tl.float32), True, BLOCK)
    if p < 1.0:
        wanted = p * _weight_from(logits, vocab_size, least, BLOCK)
        least = _bisect(logits, vocab_size, least, wanted, False, BLOCK)
    tl.store(cut + row, _from_order(least))


@triton.jit
def _bisect(logits, vocab_size, low, wanted, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The least logit, in order, above which there is less than `wanted` (tokens, or weight); 0 is the largest."""
    high = low * 0
    while low < high:
        middle = low + ((high - low) >> 1)
        above = tl.zeros([BLOCK], tl.float32)
        below = tl.zeros([BLOCK], tl.int32) + low
        beyond = tl.zeros([BLOCK], tl.int32) + high
        for start in range(0, vocab_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            logit = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
            ordered = _in_order(logit)
            is_above = ordered > middle
            above += tl.where(is_above, 1.0 if COUNTS else tl.exp(logit), 0.0)
            below = tl.maximum(below, tl.where(is_above, low, ordered))
            beyond = tl.minimum(beyond, tl.where(is_above, ordered, high))
        if tl.sum(above, 0) < wanted:
            high = tl.max(below, 0)
        else:
            low = tl.min(beyond, 0)
    return low


@triton.jit
def _weight_from(logits, vocab_size, least, BLOCK: tl.constexpr):
    """Sum of the weights of the logits that are not below `least`."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
        total += tl.where(_in_order(logit) >= least, tl.exp(logit), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _in_order(number):
    """Integers in the order of float32 numbers; -0 counts as +0."""
    bits = (number + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_order(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
