"""The kernels of a step around the decoder, for GPUs; apart from `step_ops`, as `ops_triton` is from `ops`."""

from kvasir_runtime.kernels.argmax_triton import triton_argmax
from kvasir_runtime.kernels.load_inputs_triton import triton_load_inputs
from kvasir_runtime.kernels.look_up_triton import TritonLookUp
from kvasir_runtime.kernels.philox_triton import triton_uniform
from kvasir_runtime.kernels.prepare_inputs_triton import triton_prepare_inputs
from kvasir_runtime.kernels.step_ops import StepOps
from kvasir_runtime.kernels.top_k_top_p_triton import TritonLeastLikelyKept
from kvasir_runtime.kernels.verify_drafts_triton import TritonVerifyMostLikely, triton_verify_drafts


def triton_step_ops() -> StepOps:
    """Our Triton kernels, for one stream: steps run one at a time."""
    return StepOps(
        prepare_inputs=triton_prepare_inputs,
        load_inputs=triton_load_inputs,
        argmax=triton_argmax,
        uniform=triton_uniform,
        least_likely_kept=TritonLeastLikelyKept(),
        look_up=TritonLookUp(),
        sample=None,
        verify_drafts=triton_verify_drafts,
        verify_most_likely=TritonVerifyMostLikely(),
    )
