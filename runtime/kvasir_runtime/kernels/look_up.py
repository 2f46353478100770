"""A draw from a distribution: the token whose share of the row's weights holds a number in [0, 1)."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvasir_runtime.kernels.top_k_top_p import FIXED_POINT

_CHUNK = 128
"""Tokens summed up at once on a CPU."""

LookUp = Callable[[Tensor, Tensor], Tensor]


def look_up_reference(weights: Tensor, draws: Tensor) -> Tensor:
    """Token ids int64 [n] for float32 weights [n, vocab_size], of which the largest is 1, and float64 draws [n].

    Weights are summed up as integers, so the order does not show. Where all are NaN or 0, token 0 is drawn.
    """
    upto = (weights.nan_to_num(nan=0.0) * FIXED_POINT).long().cumsum(dim=-1)
    total = upto[:, -1]
    target = torch.minimum((draws * total.double()).long(), total - 1)
    return torch.where(total > 0, (upto <= target.unsqueeze(1)).sum(dim=-1), 0)


def look_up_in_chunks(weights: Tensor, draws: Tensor) -> Tensor:
    """The same on a CPU, in two levels: few numbers are summed up one by one, and floats are summed up faster."""
    num_rows, vocab_size = weights.shape
    if vocab_size % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, _CHUNK - vocab_size % _CHUNK))
    chunks = weights.view(num_rows, -1, _CHUNK)
    sums = chunks.sum(dim=-1).double()
    upto = sums.cumsum(dim=-1)
    total = upto[:, -1]
    target = (draws * total).unsqueeze(1)
    chunk = torch.searchsorted(upto, target, right=True).clamp_(max=upto.shape[1] - 1)
    inside = target - (upto.gather(1, chunk) - sums.gather(1, chunk))
    inner = chunks[torch.arange(num_rows), chunk.squeeze(1)].double().cumsum(dim=-1)
    # The chunk's sum was rounded: a draw at its very end must still meet a token with a weight.
    inside = torch.minimum(inside, torch.nextafter(inner[:, -1:], torch.zeros((), dtype=inner.dtype)))
    token_ids = (chunk * _CHUNK + torch.searchsorted(inner, inside, right=True)).squeeze(1)
    return torch.where(total > 0, token_ids, 0)
