"""All small kernels for GPUs; apart from `ops` and `step_ops`, since importing Triton takes a second that CPUs save."""

from kvasir_runtime.kernels.activation_triton import triton_gelu_tanh_and_mul, triton_silu_and_mul
from kvasir_runtime.kernels.argmax_triton import triton_argmax
from kvasir_runtime.kernels.experts_triton import triton_combine_experts, triton_group_by_expert, triton_route
from kvasir_runtime.kernels.inputs_triton import triton_load_inputs, triton_prepare_inputs
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.kernels.penalties_triton import triton_penalize
from kvasir_runtime.kernels.rms_norm_triton import triton_add_rms_norm, triton_rms_norm
from kvasir_runtime.kernels.sample_triton import TritonSample
from kvasir_runtime.kernels.step_ops import StepOps
from kvasir_runtime.kernels.verify_drafts_triton import TritonVerifyMostLikely, triton_verify_drafts


def triton_ops() -> Ops:
    return Ops(
        name="triton",
        rms_norm=triton_rms_norm,
        add_rms_norm=triton_add_rms_norm,
        silu_and_mul=triton_silu_and_mul,
        gelu_tanh_and_mul=triton_gelu_tanh_and_mul,
        route=triton_route,
        group_by_expert=triton_group_by_expert,
        combine_experts=triton_combine_experts,
    )


def triton_step_ops() -> StepOps:
    """Our Triton kernels, for one stream: steps run one at a time."""
    return StepOps(
        prepare_inputs=triton_prepare_inputs,
        load_inputs=triton_load_inputs,
        argmax=triton_argmax,
        sample=TritonSample(),
        adjusts_logits=False,
        penalize=triton_penalize,
        verify_drafts=triton_verify_drafts,
        verify_most_likely=TritonVerifyMostLikely(),
    )
