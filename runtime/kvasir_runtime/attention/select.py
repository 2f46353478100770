"""Chooses the attention backend for a device, or the one that the user named."""

import torch

from kvasir_runtime.attention.backend import AttentionBackend
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.attention.step_lengths import DecodeBounds
from kvasir_runtime.errors import ConfigurationError

_OF_DEVICE = {"cpu": ("cpu", "reference"), "cuda": ("triton", "reference")}
"""Backends that run on a device, the automatic choice first."""


def select_backend(name: str, device: torch.device, bounds: DecodeBounds) -> AttentionBackend:
    """The backend `name`; `auto`: the fastest for the device. Raises ConfigurationError when it cannot run there."""
    possible = _OF_DEVICE[device.type]
    chosen = possible[0] if name == "auto" else name
    if chosen not in possible:
        raise ConfigurationError(
            f"attention backend {name!r} does not run on {device.type}; expected auto or one of {', '.join(possible)}"
        )
    if chosen == "reference":
        return ReferenceAttention()
    return _fast_backend(chosen, device, bounds)


def _fast_backend(name: str, device: torch.device, bounds: DecodeBounds) -> AttentionBackend:
    """Imported when chosen: Triton is not installed everywhere, and the C++ kernels are compiled on first use."""
    if name == "cpu":
        from kvasir_runtime.attention.cpu import CpuAttention

        return CpuAttention()
    from kvasir_runtime.attention.triton import TritonAttention

    return TritonAttention(device, bounds)
