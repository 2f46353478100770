"""The weighted sum of experts' outputs in Triton; the torch twin is `combine_experts_reference`."""

import torch
import triton
import triton.language as tl

from kvasir_runtime.kernels.expert_routing import Routing

_BLOCK = 1024


def triton_combine_experts(outputs: torch.Tensor, routing: Routing, local: range) -> torch.Tensor:
    """As `combine_experts_reference`."""
    (num_tokens, top_k), width = routing.experts.shape, outputs.shape[1]
    out = torch.empty((num_tokens, width), dtype=outputs.dtype, device=outputs.device)
    _combine_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
        outputs, routing.weights, routing.experts, out, width, local.start, local.stop, TOP_K=top_k, BLOCK=_BLOCK
    )
    return out


@triton.jit(do_not_specialize=["first_expert", "end_expert"])
def _combine_kernel(
    outputs, weights, experts, out, width, first_expert, end_expert, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, tile of columns)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(experts + pair)
        is_local = (expert >= first_expert) & (expert < end_expert)
        output = tl.load(outputs + pair * width + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(is_local, output * tl.load(weights + pair), 0.0)  # else undefined, NaN maybe
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
