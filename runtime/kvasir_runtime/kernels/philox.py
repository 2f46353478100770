"""Counter-based uniform numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number depends on its sequence's seed and position alone, so a sequence draws the same tokens in any batch, after
preemption, on another pod, and with any drafts.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_NUM_ROUNDS = 10


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
