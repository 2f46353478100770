"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone and fused with the residual addition before it.

The mean is taken in float32 whatever the activations' type; the weight is used as it is (the loader adds Gemma's 1).
"""

from collections.abc import Callable
from ctypes import CDLL

import torch

from kvasir_runtime.kernels.native import DTYPE_CODES


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row of x [..., H] and scale by weight [H]; the result has x's type and shape."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x [T, H] to residual in place, and return (normalised residual, residual)."""
    residual += x
    return rms_norm_reference(residual, weight, eps), residual


def cpu_rms_norm(library: CDLL) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """The compiled rms_norm; x may be [T, H] or heads [T, N, D] with any strides outside the last dimension."""
    native = library.kvasir_rms_norm

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        code = _code(x, weight)
        if code is None or x.dim() not in (2, 3):
            return rms_norm_reference(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        width = x.shape[-1]
        group, row_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
        native(
            *(code, DTYPE_CODES[weight.dtype], x.data_ptr(), out.numel() // width, group, x.stride(0), row_stride),
            *(weight.data_ptr(), out.data_ptr(), width, eps),
        )
        return out

    return rms_norm


def cpu_add_rms_norm(
    library: CDLL,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]:
    """The compiled add_rms_norm."""
    native = library.kvasir_add_rms_norm

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        code = _code(x, weight)
        if code is None or residual.dtype != x.dtype or residual.stride(1) != 1:
            return add_rms_norm_reference(x, residual, weight, eps)
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=x.dtype)
        native(
            *(code, DTYPE_CODES[weight.dtype], x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0)),
            *(weight.data_ptr(), out.data_ptr(), rows, width, eps),
        )
        return out, residual

    return add_rms_norm


def _code(x: torch.Tensor, weight: torch.Tensor) -> int | None:
    """The type's number in the compiled code, or None for what only the reference can do."""
    if x.stride(-1) != 1 or weight.dtype not in (torch.float32, x.dtype):
        return None
    return DTYPE_CODES.get(x.dtype)
