"""Chooses the attention backend for a device, or the one that the user named."""

from collections.abc import Sequence

import torch

from kvasir_runtime.attention.backend import AttentionBackend, DecodeBounds
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kv_cache.spec import KvSpec

_OF_DEVICE = {"cpu": ("cpu", "reference"), "cuda": ("triton", "reference")}
"""Backends that run on a device, the automatic choice first."""


def select_backend(
    name: str, device: torch.device, bounds: DecodeBounds, kv_cache_dtype: str = "auto"
) -> AttentionBackend:
    """The backend `name`; `auto`: the fastest for the device. Raises ConfigurationError when it cannot run there, or
    cannot read such a KV cache."""
    possible = _OF_DEVICE[device.type]
    chosen = possible[0] if name == "auto" else name
    if chosen not in possible:
        raise ConfigurationError(
            f"attention backend {name!r} does not run on {device.type}; expected auto or one of {', '.join(possible)}"
        )
    if kv_cache_dtype != "auto" and chosen != "reference":
        raise ConfigurationError(
            f"attention backend {chosen!r} cannot read --kv-cache-dtype {kv_cache_dtype}: leave it out, or add "
            "--attention-backend reference, which is slow"
        )
    if chosen == "reference":
        return ReferenceAttention()
    return _fast_backend(chosen, device, bounds)


def check_readable(backend: str, specs: Sequence[KvSpec]) -> None:
    """Raises ConfigurationError when the backend cannot compute attention over such KV."""
    for spec in specs:
        if spec.reach.kind == "chunk":
            raise ConfigurationError(
                f"the model has layers whose tokens see their own chunk of {spec.reach.size} tokens: attention over "
                "chunks is not computed yet; serve another model"
            )
        if spec.value_dim and spec.key_dim != spec.value_dim and backend != "reference":
            raise ConfigurationError(
                f"attention backend {backend!r} reads keys and values of one size, and the model has keys of "
                f"{spec.key_dim} numbers and values of {spec.value_dim}: add --attention-backend reference, which is "
                "slow"
            )


def _fast_backend(name: str, device: torch.device, bounds: DecodeBounds) -> AttentionBackend:
    """Imported when chosen: Triton is not installed everywhere, and the C++ kernels are compiled on first use."""
    if name == "cpu":
        from kvasir_runtime.attention.cpu import CpuAttention

        return CpuAttention()
    from kvasir_runtime.attention.triton import TritonAttention

    return TritonAttention(device, bounds)
