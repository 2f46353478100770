"""One implementation of every small kernel, gathered for the decoder: plain torch, or compiled for this CPU.

The decoder calls these by name and never asks which implementation it holds. Attention, with what
happens to its inputs, and linear layers, grouped ones too, are apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvasir_runtime.kernels.experts import (
    ExpertGroups,
    Routing,
    combine_experts_reference,
    cpu_combine_experts,
    cpu_group_by_expert,
    cpu_route,
    group_by_expert_reference,
    route_reference,
)
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.rowwise import (
    add_rms_norm_reference,
    cpu_add_rms_norm,
    cpu_gelu_tanh_and_mul,
    cpu_rms_norm,
    cpu_silu_and_mul,
    gelu_tanh_and_mul_reference,
    rms_norm_reference,
    silu_and_mul_reference,
)

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
AddRmsNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
GatedActivation = Callable[[Tensor], Tensor]
Route = Callable[[Tensor, int, bool], Routing]
GroupByExpert = Callable[[Tensor, range], ExpertGroups]
CombineExperts = Callable[[Tensor, Routing, range], Tensor]


@dataclass(frozen=True)
class Ops:
    """The decoder's small kernels. Each reference function's docstring gives shapes and effects."""

    name: str
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    silu_and_mul: GatedActivation
    gelu_tanh_and_mul: GatedActivation
    route: Route
    group_by_expert: GroupByExpert
    combine_experts: CombineExperts


def reference_ops() -> Ops:
    """Plain torch, any device and float type: the twin that every fast kernel is tested against."""
    return Ops(
        name="reference",
        rms_norm=rms_norm_reference,
        add_rms_norm=add_rms_norm_reference,
        silu_and_mul=silu_and_mul_reference,
        gelu_tanh_and_mul=gelu_tanh_and_mul_reference,
        route=route_reference,
        group_by_expert=group_by_expert_reference,
        combine_experts=combine_experts_reference,
    )


def cpu_ops() -> Ops:
    """The kernels compiled for this CPU, or the reference where there is no compiler (the log says so)."""
    library = load_library()
    if library is None:
        return reference_ops()
    return Ops(
        name="cpu",
        rms_norm=cpu_rms_norm(library),
        add_rms_norm=cpu_add_rms_norm(library),
        silu_and_mul=cpu_silu_and_mul(library),
        gelu_tanh_and_mul=cpu_gelu_tanh_and_mul(library),
        route=cpu_route(library),
        group_by_expert=cpu_group_by_expert(library),
        combine_experts=cpu_combine_experts(library),
    )
