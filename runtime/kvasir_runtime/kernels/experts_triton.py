"""A mixture's kernels around its grouped products in Triton; the torch twins are in `experts`.

Sorting takes one launch, whatever the routing: each program finds the place of one expert's pairs by counting those of
the experts before it, so that none waits for another and pairs keep their order.
"""

import torch
import triton
import triton.language as tl

from kvasir_runtime.kernels.experts import ExpertGroups, Routing


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


_BLOCK = 1024


def triton_group_by_expert(experts: torch.Tensor, local: range) -> ExpertGroups:
    """As `group_by_expert_reference`."""
    pairs = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    ends = torch.empty(len(local), dtype=torch.int32, device=experts.device)
    _group_kernel[(len(local),)](experts, pairs, ends, experts.numel(), local.start, BLOCK=_BLOCK)
    return ExpertGroups(pairs, ends, experts.shape[1])


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def _group_kernel(experts, pairs, ends, num_pairs, first_expert, BLOCK: tl.constexpr):
    """Program (local expert)."""
    expert = tl.program_id(0)
    place = tl.zeros((), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        local = tl.load(experts + pair, mask=pair < num_pairs, other=-1) - first_expert
        place += tl.sum(((local >= 0) & (local < expert)).to(tl.int32), 0)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        inside = pair < num_pairs
        mine = (tl.load(experts + pair, mask=inside, other=0) - first_expert == expert) & inside
        behind = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(pairs + place + behind - 1, pair, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
    tl.store(ends + expert, place)


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
