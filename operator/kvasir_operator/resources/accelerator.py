"""The accelerators of an engine pod: which resource they are, how many, and the device that the engine is told."""

from typing import Final, Literal

from kvasir_operator.api.model import DEFAULT_ACCELERATOR, NO_ACCELERATOR
from kvasir_operator.desired.roles import EngineRole

_NVIDIA: Final = "nvidia.com/"


def accelerator(role: EngineRole) -> str | None:
    """The resource's name; None for a role that computes on CPUs, or gets its devices by `resources.claims`."""
    named = role.resources.accelerator or DEFAULT_ACCELERATOR
    # A profile or the installation may name one for a service that leaves it unused.
    return None if named == NO_ACCELERATOR or role.engine.device == "cpu" else named


def device(role: EngineRole) -> Literal["auto", "cuda", "cpu"]:
    """`cuda` wherever NVIDIA's devices are asked for, whole or in parts.

    With `auto` an engine that cannot use the device it holds would compute on CPUs in silence.
    """
    named = accelerator(role)
    if role.engine.device == "auto" and named is not None and named.startswith(_NVIDIA):
        return "cuda"
    return role.engine.device
