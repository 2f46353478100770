"""Where min_p, top_k and top_p cut: the least scaled logit that each row keeps. Equal logits stay together.

min_p has cut already, top_k keeps the k most likely tokens, top_p of what these leave the fewest whose probabilities
add up to p. Weights are summed up as integers, so that every way of adding them finds the same cut.
"""

import torch
from torch import Tensor

FIXED_POINT = 2.0**40
"""Of a weight; a million tokens add up to less than 2**63."""


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
