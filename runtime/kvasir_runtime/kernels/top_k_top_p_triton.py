"""Where top_k and top_p cut, in Triton and without a sort; the torch twin is `least_likely_kept_reference`.

The cut is the least weight of the row above which there are fewer than k tokens (less than p of the total). A weight
of 0 to 1 has 30 bits, in the order of the weights: three passes over the row find 10 each. In a pass many programs add
their blocks to a histogram of the row, and the last that is done picks the bin that the cut lies in. Sums are integers,
so neither the order of the programs nor the rest of the batch shows in them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir_runtime.kernels.top_k_top_p import FIXED_POINT

_BLOCK = 2048
_DIGIT = tl.constexpr(10)
_BINS = tl.constexpr(1024)
_LARGEST = tl.constexpr(0x3F800000)
"""The bits of 1."""
_SCALE = tl.constexpr(FIXED_POINT)


class TritonLeastLikelyKept:
    """As `least_likely_kept_reference`; a row that keeps all may get 0. Owns histograms, so calls follow each other on
    one stream."""

    def __init__(self) -> None:
        self._workspace: tuple[Tensor, Tensor] | None = None
        """Histograms int64 [n, _BINS], and int32 [n], programs that are done with a row; 0 between calls."""

    def __call__(self, weights: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        num_rows, vocab_size = weights.shape
        device = weights.device
        if self._workspace is None or self._workspace[1].shape[0] < num_rows:
            histograms = torch.zeros((num_rows, _BINS.value), dtype=torch.int64, device=device)
            self._workspace = histograms, torch.zeros(num_rows, dtype=torch.int32, device=device)
        cut = torch.empty((num_rows, 1), dtype=torch.float32, device=device)
        found = torch.empty(num_rows, dtype=torch.int32, device=device)
        wanted = torch.empty(num_rows, dtype=torch.int64, device=device)
        grid = (num_rows, triton.cdiv(vocab_size, _BLOCK))
        for limit, counts in ((top_k, True), (top_p, False)):
            for shift in (20, 10, 0) if limit is not None else ():
                _find_digit_kernel[grid](
                    cut, found, wanted, *self._workspace, weights, weights.stride(0), vocab_size, limit, shift,
                    int(top_k is not None), COUNTS=counts, BLOCK=_BLOCK, num_warps=8,
                )  # fmt: skip
        return cut


@triton.jit(do_not_specialize=["shift", "has_top_k"])
def _find_digit_kernel(
    cut, found, wanted, histograms, num_done, weights, row_stride, vocab_size, limit, shift, has_top_k,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block). Of a row's cut the bits above `shift + 10` are `found`: find ten more.

    With `COUNTS` it is that of `top_k`, else that of `top_p` among the tokens that top_k leaves, whose cut is there.
    """
    row = tl.program_id(0)
    own = tl.load(limit + row)
    if COUNTS:
        takes_part = own < vocab_size
    else:
        takes_part = own < 1.0
    if (takes_part == 0) & (COUNTS | (has_top_k == 0)) & (tl.program_id(1) == 0):
        tl.store(cut + row, 0.0)
    if takes_part:
        prefix = 0
        if shift < 20:
            prefix = tl.load(found + row)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab_size
        weight = tl.load(weights + row.to(tl.int64) * row_stride + column, mask=inside, other=0.0)
        weight = tl.where(weight == weight, weight, 0.0)
        bits = tl.minimum(weight.to(tl.int32, bitcast=True), _LARGEST)
        is_in = inside & ((bits >> shift >> _DIGIT) == prefix)
        histogram = histograms + row * _BINS
        if COUNTS:
            tl.atomic_add(histogram + ((bits >> shift) & (_BINS - 1)), tl.full([BLOCK], 1, tl.int64), is_in, "relaxed")
        else:
            if has_top_k:
                is_in &= weight >= tl.load(cut + row)
            amount = tl.where(is_in, (weight * _SCALE).to(tl.int64), 0)
            # All tokens this unlikely weigh less than what top_p leaves out: the cut lies above them, and one sum of
            # them will do.
            is_tail = weight < 0.5 * (1.0 - own) / vocab_size
            tail = tl.sum(tl.where(is_tail, amount, 0), 0)
            tl.atomic_add(histogram, tail, tail > 0, "relaxed")
            tl.atomic_add(histogram + ((bits >> shift) & (_BINS - 1)), amount, (amount > 0) & (is_tail == 0), "relaxed")
        tl.debug_barrier()  # the block is added by all threads before one counts it
        if tl.atomic_add(num_done + row, 1) == tl.num_programs(1) - 1:
            tl.store(num_done + row, 0)
            bins = tl.arange(0, _BINS)
            in_bin = tl.load(histogram + bins, cache_modifier=".cg")
            tl.store(histogram + bins, tl.zeros([_BINS], tl.int64))
            total = tl.sum(in_bin, 0)
            above = total - tl.cumsum(in_bin, 0)
            if shift < 20:
                needed = tl.load(wanted + row)
            elif COUNTS:
                needed = own.to(tl.int64)
            else:
                needed = tl.ceil(total.to(tl.float64) * own.to(tl.float64)).to(tl.int64)
            digit = tl.min(tl.where(above < needed, bins, _BINS - 1), 0)
            prefix = (prefix << _DIGIT) | digit
            tl.store(wanted + row, needed - tl.sum(tl.where(bins == digit, above, 0), 0))
            tl.store(found + row, prefix)
            if shift == 0:
                tl.store(cut + row, prefix.to(tl.float32, bitcast=True))
