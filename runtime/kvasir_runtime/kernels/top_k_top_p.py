"""Where top_k and top_p cut: the least weight that each row keeps. Equally likely tokens stay together.

top_k keeps the k most likely tokens, top_p of what top_k leaves the fewest whose probabilities add up to p. Weights are
summed up as integers, so that every way of adding them finds the same cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor

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
    amounts = (values * FIXED_POINT).long().masked_fill(values < kth, 0)  # of those that top_k leaves
    wanted = (amounts.sum(dim=-1, keepdim=True).double() * top_p.double().unsqueeze(1)).ceil().long()
    before = amounts.cumsum(dim=-1) - amounts
    num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
    nucleus = torch.maximum(kth, values.gather(1, num_kept - 1))
    return torch.where(top_p.unsqueeze(1) < 1.0, nucleus, kth)
