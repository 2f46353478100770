"""RMSNorm in Triton, alone and fused with the residual addition before it; the torch twins are in `rms_norm`."""

import torch
import triton
import triton.language as tl

from kvasir_runtime.kernels.dependent_launch_triton import let_next_start, wait_for_previous
from kvasir_runtime.kernels.launches import Launcher


def triton_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rms_norm_reference`; x is [T, H], or heads [T, N, D] with any strides outside the last dimension."""
    heads = x.unsqueeze(1) if x.dim() == 2 else x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, group, width = heads.shape
    _launch_rms_norm(
        (rows, group),
        x, heads.stride(0), heads.stride(1), x, 0, weight, out, width, eps,
        PADDED=triton.next_power_of_2(width), ADDS=False,
    )  # fmt: skip
    return out


def triton_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `add_rms_norm_reference`: x [T, H] is added to residual in place."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _launch_rms_norm(
        (rows, 1),
        x, x.stride(0), 0, residual, residual.stride(0), weight, out, width, eps,
        PADDED=triton.next_power_of_2(width), ADDS=True,
    )  # fmt: skip
    return out, residual


@triton.jit
def _rms_norm_kernel(
    x, row_stride, head_stride, residual, residual_stride, weight, out, width, eps,
    PADDED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Program (row, head)."""
    wait_for_previous()
    let_next_start()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, PADDED)
    inside = columns < width
    values = tl.load(x + row * row_stride + head * head_stride + columns, mask=inside, other=0.0)
    if ADDS:
        place = residual + row * residual_stride + columns
        old = tl.load(place, mask=inside, other=0.0)
        values = (values.to(tl.float32) + old.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, values, mask=inside)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    scaled = wide * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (row * tl.num_programs(1) + head) * width + columns, scaled.to(out.dtype.element_ty), mask=inside)


_launch_rms_norm = Launcher(_rms_norm_kernel, starts_early=True)
