"""Rotary position embedding (Su et al. 2021) in the half-split (GPT-NeoX) style, in place on query and key.

The first `rotary_dim` numbers of each head turn; the rest pass through (partial rotary). The compiled kernels turn as
part of `rotate_and_write`.
"""

import torch


def rotary_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Turn query [T, Hq, D] and key [T, Hk, D] in place by their positions int64 [T].

    cos and sin are float32 [max_position, R], the second half of the columns equal to the first: number i of a head
    turns with number i + R / 2 by the angle of column i.
    """
    half = cos.shape[-1] // 2
    turn_cos = cos[positions, :half].unsqueeze(1)  # [T, 1, R / 2]
    turn_sin = sin[positions, :half].unsqueeze(1)
    for heads in (query, key):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        turned = (first * turn_cos - second * turn_sin, second * turn_cos + first * turn_sin)
        heads[..., :half], heads[..., half : 2 * half] = turned[0].to(heads.dtype), turned[1].to(heads.dtype)
