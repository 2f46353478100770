"""Where top_k and top_p cut, in Triton and without a sort; the torch twin is `least_likely_kept_reference`.

The cut is the least scaled logit of the row above which there are fewer than k tokens (less than p of the total). Three
passes over the row find 11, 10 and 10 bits of its key, a number of 31 in the order of the logits. In a pass many
programs add their blocks to a histogram of the row, and the last that is done picks the bin that the cut lies in. Sums
are integers, so neither the order of the programs nor the rest of the batch shows in them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir_runtime.kernels.top_k_top_p import FIXED_POINT

_BLOCK = 2048
_DIGIT = tl.constexpr(10)
_FIRST = tl.constexpr(20)
"""The bits below the first digit, which has one more: a bin is an eighth of an octave of scaled logits."""
_BINS = tl.constexpr(2048)
_INFINITY = tl.constexpr(0x7F800000)
"""Its bits."""
_SCALE = tl.constexpr(FIXED_POINT)


class TritonLeastLikelyKept:
    """As `least_likely_kept_reference`. Owns histograms, so calls follow each other on one stream."""

    def __init__(self) -> None:
        self._workspace: tuple[Tensor, Tensor] | None = None
        """Histograms int64 [n, _BINS], and int32 [n], programs that are done with a row; 0 between calls."""

    def __call__(self, scaled: Tensor, least: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        num_rows, vocab_size = scaled.shape
        device = scaled.device
        if self._workspace is None or self._workspace[1].shape[0] < num_rows:
            histograms = torch.zeros((num_rows, _BINS.value), dtype=torch.int64, device=device)
            self._workspace = histograms, torch.zeros(num_rows, dtype=torch.int32, device=device)
        cut = least.clone()
        found = torch.empty(num_rows, dtype=torch.int32, device=device)
        wanted = torch.empty(num_rows, dtype=torch.int64, device=device)
        grid = (num_rows, triton.cdiv(vocab_size, _BLOCK))
        for limit, counts in ((top_k, True), (top_p, False)):
            for shift in (20, 10, 0) if limit is not None else ():
                _find_digit_kernel[grid](
                    cut, found, wanted, *self._workspace, scaled, scaled.stride(0), vocab_size, limit, shift,
                    COUNTS=counts, BLOCK=_BLOCK, num_warps=8,
                )  # fmt: skip
        return cut


@triton.jit(do_not_specialize=["shift"])
def _find_digit_kernel(
    cut, found, wanted, histograms, num_done, scaled, row_stride, vocab_size, limit, shift,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block). Of the key of a row's cut the bits above `shift + 10` are `found`: find ten more.

    With `COUNTS` it is the cut of `top_k`, else that of `top_p` among the tokens that are left. Either raises `cut`.
    """
    row = tl.program_id(0)
    own = tl.load(limit + row)
    if COUNTS:
        takes_part = own < vocab_size
    else:
        takes_part = own < 1.0
    if takes_part:
        prefix = 0
        if shift < _FIRST:
            prefix = tl.load(found + row)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab_size
        logit = tl.load(scaled + row.to(tl.int64) * row_stride + column, mask=inside, other=float("-inf"))
        key = -tl.minimum(tl.abs(logit).to(tl.int32, bitcast=True), _INFINITY) + _INFINITY  # NaN is as -inf
        is_in = inside & ((shift == _FIRST) | ((key >> shift >> _DIGIT) == prefix))
        histogram = histograms + row * _BINS
        bins = tl.arange(0, _BINS)
        digit = (key >> shift) & (_BINS - 1)  # of all but the first the upper bit is the prefix's lowest
        if COUNTS:
            in_block = tl.histogram(digit, _BINS, is_in).to(tl.int64)
            tl.atomic_add(histogram + bins, in_block, in_block > 0, "relaxed")
        else:
            is_in &= logit >= tl.load(cut + row)
            weight = tl.where(is_in, tl.exp(logit), 0.0)
            amount = (weight * _SCALE).to(tl.int64)
            # All tokens this unlikely weigh less than what top_p leaves out: the cut lies above them, and one sum of
            # them will do.
            is_tail = weight < 0.5 * (1.0 - own) / vocab_size
            tail = tl.sum(tl.where(is_tail, amount, 0), 0)
            tl.atomic_add(histogram, tail, tail > 0, "relaxed")
            tl.atomic_add(histogram + digit, amount, (amount > 0) & (is_tail == 0), "relaxed")
        tl.debug_barrier()  # the block is added by all threads before one counts it
        if tl.atomic_add(num_done + row, 1) == tl.num_programs(1) - 1:
            tl.store(num_done + row, 0)
            in_bin = tl.load(histogram + bins, cache_modifier=".cg")
            tl.store(histogram + bins, tl.zeros([_BINS], tl.int64))
            total = tl.sum(in_bin, 0)
            above = total - tl.cumsum(in_bin, 0)
            if shift < _FIRST:
                needed = tl.load(wanted + row)
            elif COUNTS:
                needed = own.to(tl.int64)
            else:
                needed = tl.ceil(total.to(tl.float64) * own.to(tl.float64)).to(tl.int64)
            first = tl.min(tl.where(above < needed, bins, _BINS - 1), 0)
            if shift < _FIRST:
                prefix = (prefix << _DIGIT) | (first & (_BINS // 2 - 1))
            else:
                prefix = first
            tl.store(wanted + row, needed - tl.sum(tl.where(bins == first, above, 0), 0))
            tl.store(found + row, prefix)
            if shift == 0:
                least = -(-prefix + _INFINITY).to(tl.float32, bitcast=True)
                tl.store(cut + row, tl.maximum(least, tl.load(cut + row)))
