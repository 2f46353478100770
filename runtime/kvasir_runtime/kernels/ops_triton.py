"""The decoder's small kernels for GPUs; apart from `ops`, since importing Triton takes a second that CPUs can save."""

from kvasir_runtime.kernels.activation_triton import triton_gelu_tanh_and_mul, triton_silu_and_mul
from kvasir_runtime.kernels.argmax_triton import triton_argmax
from kvasir_runtime.kernels.combine_experts_triton import triton_combine_experts
from kvasir_runtime.kernels.expert_groups_triton import triton_group_by_expert
from kvasir_runtime.kernels.expert_routing_triton import triton_route
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.kernels.rms_norm_triton import triton_add_rms_norm, triton_rms_norm


def triton_ops() -> Ops:
    return Ops(
        name="triton",
        rms_norm=triton_rms_norm,
        add_rms_norm=triton_add_rms_norm,
        silu_and_mul=triton_silu_and_mul,
        gelu_tanh_and_mul=triton_gelu_tanh_and_mul,
        argmax=triton_argmax,
        route=triton_route,
        group_by_expert=triton_group_by_expert,
        combine_experts=triton_combine_experts,
    )
