"""Gated activations in Triton; the torch twins are in `activation`."""

import torch
import triton
import triton.language as tl

from kvasir_runtime.kernels.dependent_launch_triton import let_next_start, wait_for_previous
from kvasir_runtime.kernels.launches import Launcher

BLOCK = 1024


def triton_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul_reference`."""
    return _gated(gate_up, is_gelu=False)


def triton_gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `gelu_tanh_and_mul_reference`."""
    return _gated(gate_up, is_gelu=True)


def _gated(gate_up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = rows, triton.cdiv(width, BLOCK)
    _launch_gated(grid, gate_up, gate_up.stride(0), out, width, IS_GELU=is_gelu, BLOCK=BLOCK)
    return out


@triton.jit
def _gated_kernel(gate_up, row_stride, out, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, tile of columns)."""
    wait_for_previous()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = gate_up + row * row_stride + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    if IS_GELU:  # x * (1 + tanh(z)) / 2 is x * sigmoid(2 z)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * width + columns, (gate * up).to(out.dtype.element_ty), mask=inside)


_launch_gated = Launcher(_gated_kernel, starts_early=True)
