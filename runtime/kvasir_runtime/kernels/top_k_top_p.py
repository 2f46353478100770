"""Where top_k and top_p cut: the least likely logit that each row keeps. Equally likely tokens stay together.

top_k keeps the k most likely tokens, top_p of what top_k leaves the fewest whose probabilities add up to p.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_NUM_CANDIDATES = 128
"""Most likely tokens sorted to find where top_p cuts; rows that need more are sorted whole."""

LeastLikelyKept = Callable[[Tensor, Tensor, Tensor], Tensor]


def least_likely_kept_reference(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The cut float32 [n, 1] of float32 logits [n, vocab_size]; smaller ones are to be dropped.

    `logits` have a maximum of 0, but a row may be all NaN, and its cut means nothing. `top_k` int32 [n] is 1 to
    vocab_size (all), `top_p` float32 [n] is above 0; 1 keeps all. Any device, no synchronisation.
    """
    values = logits.sort(dim=-1, descending=True).values
    kth = values.gather(1, top_k.long().unsqueeze(1) - 1)
    weights = values.exp().masked_fill(values < kth, 0.0)
    wanted = weights.sum(dim=-1, keepdim=True) * top_p.unsqueeze(1)
    return _cut(values, weights, wanted, kth, top_p)[0]


def least_likely_kept_of_candidates(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The same on a CPU: mostly the first few tokens tell, and only rows that are too flat are sorted whole."""
    vocab_size = logits.shape[1]
    most_k = int(torch.where(top_k < vocab_size, top_k, 0).max())
    num_candidates = min(vocab_size, max(_NUM_CANDIDATES, most_k))
    values = logits.topk(num_candidates, dim=-1).values
    has_top_k = (top_k < vocab_size).unsqueeze(1)
    kth = values.gather(1, top_k.long().clamp(max=num_candidates).unsqueeze(1) - 1)
    kth = torch.where(has_top_k, kth, float("-inf"))
    weights = values.exp().masked_fill(values < kth, 0.0)
    total = torch.where(has_top_k, weights.sum(dim=-1, keepdim=True), logits.exp().sum(dim=-1, keepdim=True))
    cut, num_kept = _cut(values, weights, total * top_p.unsqueeze(1), kth, top_p)
    if num_candidates < vocab_size:
        unfinished = ((num_kept == num_candidates) & ~has_top_k & (top_p.unsqueeze(1) < 1.0)).squeeze(1)
        if unfinished.any():
            cut[unfinished] = least_likely_kept_reference(logits[unfinished], top_k[unfinished], top_p[unfinished])
    return cut


def _cut(values: Tensor, weights: Tensor, wanted: Tensor, kth: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(cut, number of sorted tokens kept by top_p), each [n, 1]."""
    before = weights.cumsum(dim=-1) - weights
    num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
    nucleus = torch.maximum(kth, values.gather(1, num_kept - 1))
    return torch.where(top_p.unsqueeze(1) < 1.0, nucleus, kth), num_kept
