"""A draw from a distribution: the token whose share of the row's weights holds a number in [0, 1)."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvasir_runtime.kernels.top_k_top_p import FIXED_POINT

LookUp = Callable[[Tensor, Tensor], Tensor]


def look_up_reference(weights: Tensor, draws: Tensor) -> Tensor:
    """Token ids int64 [n] for float32 weights [n, vocab_size], of which the largest is 1, and float64 draws [n].

    Weights are summed up as integers, so the order does not show. Where all are NaN or 0, token 0 is drawn.
    """
    upto = (weights.nan_to_num(nan=0.0) * FIXED_POINT).long().cumsum(dim=-1)
    total = upto[:, -1]
    target = torch.minimum((draws * total.double()).long(), total - 1)
    return torch.where(total > 0, (upto <= target.unsqueeze(1)).sum(dim=-1), 0)
