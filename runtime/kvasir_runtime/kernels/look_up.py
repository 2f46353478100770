"""A draw from a distribution: the token whose share of the row's weights holds a number in [0, 1)."""

import torch
from torch import Tensor

from kvasir_runtime.kernels.top_k_top_p import FIXED_POINT


def look_up_reference(scaled: Tensor, cut: Tensor, draws: Tensor) -> Tensor:
    """Token ids int64 [n] for float32 scaled logits [n, vocab_size], of which the largest is 0, and float64 draws [n].

    A token weighs e to its scaled logit, below `cut` float32 [n] nothing. Weights are summed up as integers, so the
    order does not show. Where all logits are NaN, token 0 is drawn.
    """
    amounts = torch.where(scaled >= cut.unsqueeze(1), scaled.exp() * FIXED_POINT, 0.0).long()
    upto = amounts.cumsum(dim=-1)
    total = upto[:, -1]
    target = torch.minimum((draws * total.double()).long(), total - 1)
    return torch.where(total > 0, (upto <= target.unsqueeze(1)).sum(dim=-1), 0)
