"""Gated activations of the feed-forward layer: silu(gate) * up and gelu_tanh(gate) * up on one packed input."""

from collections.abc import Callable
from ctypes import CDLL

import torch
from torch.nn import functional

from kvasir_runtime.kernels.native import DTYPE_CODES, warn_of_twin


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, I] for gate_up [T, 2I], gate in the first half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up [T, I] with the tanh form of gelu, gate in the first half of gate_up [T, 2I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def cpu_silu_and_mul(library: CDLL) -> Callable[[torch.Tensor], torch.Tensor]:
    """The compiled silu_and_mul."""
    return _gated(library.kvasir_silu_and_mul, silu_and_mul_reference)


def cpu_gelu_tanh_and_mul(library: CDLL) -> Callable[[torch.Tensor], torch.Tensor]:
    """The compiled gelu_tanh_and_mul."""
    return _gated(library.kvasir_gelu_tanh_and_mul, gelu_tanh_and_mul_reference)


def _gated(
    native: Callable[..., None], reference: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype not in DTYPE_CODES or gate_up.dim() != 2 or gate_up.stride(1) != 1:
            warn_of_twin("the gated activation", f"its input is {gate_up.dtype} with strides {gate_up.stride()}")
            return reference(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        native(DTYPE_CODES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width)
        return out

    return gated
