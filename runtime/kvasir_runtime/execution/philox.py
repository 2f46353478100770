"""Counter-based uniform numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number depends on its request's seed and position alone, so a request draws the same tokens in any batch, after
preemption, and on another pod.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_NUM_ROUNDS = 10

UInt64Array = NDArray[np.uint64]


def uniform(seeds: UInt64Array, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), in steps of 2**-48; both arrays `[n]`."""
    counter = positions.astype(np.uint64)
    zero = np.zeros_like(counter)
    first, second, _, _ = philox4x32((counter & _LOW, counter >> _HALF, zero, zero), (seeds & _LOW, seeds >> _HALF))
    bits = (first << np.uint64(16)) | (second >> np.uint64(16))
    return bits.astype(np.float64) * 2.0**-48


def philox4x32(
    counter: tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array], key: tuple[UInt64Array, UInt64Array]
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Four 32-bit words (held in 64 bits) for each 128-bit counter under its 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3
