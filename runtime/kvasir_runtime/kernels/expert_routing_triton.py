"""Routing to experts in Triton; the torch twin is `route_reference`."""

import torch
import triton
import triton.language as tl

from kvasir_runtime.kernels.expert_routing import Routing


def triton_route(logits: torch.Tensor, top_k: int, renormalises: bool) -> Routing:
    """As `route_reference`."""
    rows, num_experts = logits.shape
    experts = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    _route_kernel[(rows,)](
        logits, logits.stride(0), experts, weights, num_experts, TOP_K=top_k, RENORMALISES=renormalises,
        PADDED_EXPERTS=triton.next_power_of_2(num_experts), PADDED_TOP_K=triton.next_power_of_2(top_k), num_warps=1,
    )  # fmt: skip
    return Routing(experts, weights)


@triton.jit
def _route_kernel(
    logits, row_stride, experts, weights, num_experts,
    TOP_K: tl.constexpr, RENORMALISES: tl.constexpr, PADDED_EXPERTS: tl.constexpr, PADDED_TOP_K: tl.constexpr,
):  # fmt: skip
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    columns, places = tl.arange(0, PADDED_EXPERTS), tl.arange(0, PADDED_TOP_K)
    inside = columns < num_experts
    row = tl.load(logits + token * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    left = tl.where(row == row, row, float("-inf"))  # no number is never selected, so that an expert is
    largest = tl.max(left, 0)
    selected = tl.full((PADDED_TOP_K,), float("-inf"), tl.float32)
    for k in range(TOP_K):
        value, expert = tl.max(left, 0), tl.argmax(left, 0)
        tl.store(experts + token * TOP_K + k, expert)
        selected = tl.where(places == k, value, selected)
        left = tl.where(columns == expert, float("-inf"), left)
    counted = tl.exp(selected - largest)
    total = tl.sum(counted, 0) if RENORMALISES else tl.sum(tl.exp(row - largest), 0)
    tl.store(weights + token * TOP_K + places, counted / total, mask=places < TOP_K)
