"""Counter-based uniform numbers in Triton; the torch twin, with the definition, is `uniform_reference`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


def triton_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """As `uniform_reference`: float64 [n] for int64 seeds and positions [n], each with any stride."""
    count = seeds.shape[0]
    out = torch.empty(count, dtype=torch.float64, device=seeds.device)
    _uniform_kernel[(triton.cdiv(count, _BLOCK),)](
        out, seeds, seeds.stride(0), positions, positions.stride(0), count, BLOCK=_BLOCK
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _uniform_kernel(out, seeds, seed_stride, positions, position_stride, count, BLOCK: tl.constexpr):
    """Program (block of numbers)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    seed = tl.load(seeds + index * seed_stride, mask=inside, other=0)
    position = tl.load(positions + index * position_stride, mask=inside, other=0)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = (first.to(tl.int64) << 16) | (second.to(tl.int64) >> 16)
    tl.store(out + index, bits.to(tl.float64) * 3.552713678800501e-15, mask=inside)  # 2 ** -48
