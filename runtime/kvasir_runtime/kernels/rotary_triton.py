"""Rotary position embedding in Triton, in place on query and key; the torch twin is `rotary_reference`."""

import torch
import triton
import triton.language as tl


def triton_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """As `rotary_reference`; query and key may be views into one packed projection."""
    half = cos.shape[1] // 2
    for heads in (query, key):
        _rotary_kernel[(heads.shape[0], heads.shape[1])](
            heads, heads.stride(0), heads.stride(1), cos, sin, cos.stride(0), positions, half,
            PADDED=triton.next_power_of_2(half),
        )  # fmt: skip


@triton.jit
def _rotary_kernel(
    heads, token_stride, head_stride, cos, sin, table_stride, positions, half, PADDED: tl.constexpr
):  # fmt: skip
    """Program (token, head): number i of the head turns with number i + half."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = columns < half
    angle = tl.load(positions + token) * table_stride + columns
    turn_cos = tl.load(cos + angle, mask=inside, other=1.0)
    turn_sin = tl.load(sin + angle, mask=inside, other=0.0)
    place = heads + token * token_stride + tl.program_id(1) * head_stride + columns
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * turn_cos - second * turn_sin).to(heads.dtype.element_ty), mask=inside)
    tl.store(place + half, (second * turn_cos + first * turn_sin).to(heads.dtype.element_ty), mask=inside)
