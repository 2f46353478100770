"""One random draw in plain torch, step by step: a number, where min_p, top_k and top_p cut, and the token that holds
the number.

Numbers are counter-based: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One
depends on its sequence's seed and position alone, so a sequence draws the same tokens in any batch, after preemption,
on another pod, and with any drafts.

A cut is the least scaled logit that a row keeps; equal logits stay together. min_p has cut already, top_k keeps the k
most likely tokens, top_p of what these leave the fewest whose probabilities add up to p. Weights are summed up as
integers, so that neither a cut nor a draw shows in which order they were added.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_NUM_ROUNDS = 10
FIXED_POINT = 2.0**40
"""Of a weight; a million tokens add up to less than 2**63."""


def uniform_reference(seeds: Tensor, positions: Tensor) -> Tensor:
    """Float64 [n] in [0, 1), in steps of 2**-48, for int64 seeds (the bits of unsigned ones) and positions [n]."""
    zero = torch.zeros_like(positions)
    counter = (positions & _LOW, (positions >> 32) & _LOW, zero, zero)
    first, second, _, _ = philox4x32(counter, (seeds & _LOW, (seeds >> 32) & _LOW))
    return ((first << 16) | (second >> 16)).double() * 2.0**-48


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (held in int64, where products wrap as unsigned ones do) for each counter under its key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ k0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def least_likely_kept_reference(scaled: Tensor, least: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The cut float32 [n] of float32 scaled logits [n, vocab_size]; smaller ones are to be dropped.

    A token weighs e to its scaled logit, of which the largest is 0; a row may be all NaN, and its cut means nothing.
    `least` float32 [n] is where min_p cuts, `top_k` int32 [n] is 1 to vocab_size (all), `top_p` float32 [n] is above 0;
    1 keeps all. None: all rows keep all. Any device, no synchronisation.
    """
    if top_k is None and top_p is None:
        return least
    values = scaled.sort(dim=-1, descending=True).values
    cut = least.unsqueeze(1)
    if top_k is not None:
        cut = torch.maximum(cut, values.gather(1, top_k.long().unsqueeze(1) - 1))
    if top_p is not None:
        amounts = (values.exp() * FIXED_POINT).long().masked_fill(values < cut, 0)
        wanted = (amounts.sum(dim=-1, keepdim=True).double() * top_p.double().unsqueeze(1)).ceil().long()
        num_kept = (amounts.cumsum(dim=-1) - amounts < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
        cut = torch.where(top_p.unsqueeze(1) < 1.0, torch.maximum(cut, values.gather(1, num_kept - 1)), cut)
    return cut.squeeze(1)


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
