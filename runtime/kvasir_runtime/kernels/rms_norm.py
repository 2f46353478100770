"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone and fused with the residual addition before it.

The mean is taken in float32 whatever the activations' type; the weight is used as it is (the loader adds Gemma's 1).
"""

from collections.abc import Callable
from ctypes import CDLL

import torch

from kvasir_runtime.kernels.native import DTYPE_CODES, warn_of_twin


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
        if not _is_compiled(x, weight) or x.dim() not in (2, 3):
            warn_of_twin("rms_norm", _words(x, weight))
            return rms_norm_reference(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        width = x.shape[-1]
        group, row_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
        native(
            DTYPE_CODES[x.dtype], DTYPE_CODES[weight.dtype], x.data_ptr(), out.numel() // width, group, x.stride(0),
            row_stride, weight.data_ptr(), out.data_ptr(), width, eps,
        )  # fmt: skip
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
        if not _is_compiled(x, weight) or residual.dtype != x.dtype or residual.stride(1) != 1:
            warn_of_twin("add_rms_norm", _words(x, weight))
            return add_rms_norm_reference(x, residual, weight, eps)
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=x.dtype)
        native(
            DTYPE_CODES[x.dtype], DTYPE_CODES[weight.dtype], x.data_ptr(), x.stride(0), residual.data_ptr(),
            residual.stride(0), weight.data_ptr(), out.data_ptr(), rows, width, eps,
        )  # fmt: skip
        return out, residual

    return add_rms_norm


def _is_compiled(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dtype in DTYPE_CODES and weight.dtype in (torch.float32, x.dtype) and x.stride(-1) == 1


def _words(x: torch.Tensor, weight: torch.Tensor) -> str:
    """What cannot be read, for the log."""
    return f"x is {x.dtype} of {x.dim()} dimensions with strides {x.stride()}, the weight {weight.dtype}"
