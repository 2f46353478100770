"""Counter-based uniform numbers in Triton; the torch twin, with the definition, is `uniform_reference`."""

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position):
    """As `uniform_reference`: float64 for an int64 seed and position."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = (first.to(tl.int64) << 16) | (second.to(tl.int64) >> 16)
    return bits.to(tl.float64) * 3.552713678800501e-15  # 2 ** -48
