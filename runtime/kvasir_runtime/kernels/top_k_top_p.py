"""Where top_k and top_p cut: the least weight that each row keeps. Equally likely tokens stay together.

top_k keeps the k most likely tokens, top_p of what top_k leaves the fewest whose probabilities add up to p. Weights are
summed up as integers, so that every way of adding them finds the same cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_NUM_CANDIDATES = 128
"""Most likely tokens sorted to find where top_p cuts; rows that need more are sorted whole."""
FIXED_POINT = 2.0**40
"""Of a weight; a million tokens add up to less than 2**63."""

LeastLikelyKept = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def least_likely_kept_reference(weights: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The cut float32 [n, 1] of float32 weights [n, vocab_size]; smaller ones are to be dropped.

    Weights are probabilities up to a factor: their maximum is 1. A row may be all NaN, and its cut means nothing.
    `top_k` int32 [n] is 1 to vocab_size (all), `top_p` float32 [n] is above 0; 1 keeps all. None: all rows keep all.
    Any device, no synchronisation.
    """
    values = weights.sort(dim=-1, descending=True).values
    kth = torch.zeros_like(values[:, :1]) if top_k is None else values.gather(1, top_k.long().unsqueeze(1) - 1)
    if top_p is None:
        return kth
    amounts = _amounts(values, kth)
    return _cut(values, amounts, amounts.sum(dim=-1, keepdim=True), kth, top_p)[0]


def least_likely_kept_of_candidates(weights: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The same on a CPU: mostly the first few tokens tell, and only rows that are too flat are sorted whole."""
    vocab_size = weights.shape[1]
    if top_k is None:
        top_k = torch.full(weights.shape[:1], vocab_size, dtype=torch.int32)
    most_k = int(torch.where(top_k < vocab_size, top_k, 0).max())
    num_candidates = min(vocab_size, max(_NUM_CANDIDATES, most_k))
    values = weights.topk(num_candidates, dim=-1).values
    has_top_k = (top_k < vocab_size).unsqueeze(1)
    kth = values.gather(1, top_k.long().clamp(max=num_candidates).unsqueeze(1) - 1)
    kth = torch.where(has_top_k, kth, 0.0)
    if top_p is None:
        return kth
    amounts = _amounts(values, kth)
    all_of_them = (weights.sum(dim=-1, keepdim=True, dtype=torch.float64) * FIXED_POINT).long()
    total = torch.where(has_top_k, amounts.sum(dim=-1, keepdim=True), all_of_them)
    cut, num_kept = _cut(values, amounts, total, kth, top_p)
    if num_candidates < vocab_size:
        unfinished = ((num_kept == num_candidates) & ~has_top_k & (top_p.unsqueeze(1) < 1.0)).squeeze(1)
        if unfinished.any():
            cut[unfinished] = least_likely_kept_reference(weights[unfinished], top_k[unfinished], top_p[unfinished])
    return cut


def _amounts(values: Tensor, kth: Tensor) -> Tensor:
    """Int64, of those that top_k leaves."""
    return (values * FIXED_POINT).long().masked_fill(values < kth, 0)


def _cut(values: Tensor, amounts: Tensor, total: Tensor, kth: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(cut, number of sorted tokens kept by top_p), each [n, 1]."""
    wanted = (total.double() * top_p.double().unsqueeze(1)).ceil().long()
    before = amounts.cumsum(dim=-1) - amounts
    num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
    nucleus = torch.maximum(kth, values.gather(1, num_kept - 1))
    return torch.where(top_p.unsqueeze(1) < 1.0, nucleus, kth), num_kept
