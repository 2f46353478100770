"""A mixture's kernels around its grouped products: which experts each token goes to, the pairs of a token and one of
its experts sorted by expert, and the weighted sum of what the experts made of each token.

Pair p belongs to token p // top_k. With experts spread over ranks only pairs of this rank's experts have a place.
"""

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass

import torch

from kvasir_runtime.kernels.native import DTYPE_CODES, warn_of_twin


@dataclass(frozen=True, slots=True)
class Routing:
    experts: torch.Tensor  # int32 [num_tokens, top_k], the likeliest first
    weights: torch.Tensor  # float32 [num_tokens, top_k]

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]


def route_reference(logits: torch.Tensor, top_k: int, renormalises: bool) -> Routing:
    """The `top_k` likeliest experts of each row of logits [T, E], of equals the first.

    Their weights are the softmax over all experts, or, with `renormalises`, over the selected ones.
    """
    selected, experts = logits.float().sort(dim=-1, descending=True, stable=True)
    probabilities = (selected[:, :top_k] if renormalises else selected).softmax(dim=-1)
    return Routing(experts[:, :top_k].int(), probabilities[:, :top_k].contiguous())


def cpu_route(library: CDLL) -> Callable[[torch.Tensor, int, bool], Routing]:
    """The compiled route."""
    native = library.kvasir_route

    def route(logits: torch.Tensor, top_k: int, renormalises: bool) -> Routing:
        if logits.dtype not in DTYPE_CODES or logits.stride(1) != 1:
            warn_of_twin("routing", f"the router logits are {logits.dtype} with strides {logits.stride()}")
            return route_reference(logits, top_k, renormalises)
        rows, num_experts = logits.shape
        experts = torch.empty((rows, top_k), dtype=torch.int32)
        weights = torch.empty((rows, top_k), dtype=torch.float32)
        native(
            *(DTYPE_CODES[logits.dtype], logits.data_ptr(), logits.stride(0), rows, num_experts, top_k, renormalises),
            *(weights.data_ptr(), experts.data_ptr()),
        )
        return Routing(experts, weights)

    return route


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    pairs: torch.Tensor  # int32 [num_pairs], by expert; what lies behind the last expert's is undefined
    ends: torch.Tensor  # int32 [num_local_experts], where each expert's pairs end
    top_k: int


def group_by_expert_reference(experts: torch.Tensor, local: range) -> ExpertGroups:
    """Sort the pairs of experts int32 [num_tokens, top_k] that are in `local`; of one expert they keep their order."""
    flat = experts.flatten() - local.start
    elsewhere = (flat < 0) | (flat >= len(local))
    in_order, pairs = flat.masked_fill(elsewhere, len(local)).sort(stable=True)
    last = torch.arange(len(local), dtype=torch.int32, device=experts.device)
    ends = torch.searchsorted(in_order, last, right=True, out_int32=True)
    return ExpertGroups(pairs.int(), ends, experts.shape[1])


def cpu_group_by_expert(library: CDLL) -> Callable[[torch.Tensor, range], ExpertGroups]:
    """The compiled group_by_expert."""
    native = library.kvasir_group_by_expert

    def group_by_expert(experts: torch.Tensor, local: range) -> ExpertGroups:
        pairs = torch.empty(experts.numel(), dtype=torch.int32)
        ends = torch.empty(len(local), dtype=torch.int32)
        native(
            *(experts.contiguous().data_ptr(), experts.numel(), local.start, len(local)),
            *(pairs.data_ptr(), ends.data_ptr()),
        )
        return ExpertGroups(pairs, ends, experts.shape[1])

    return group_by_expert


def combine_experts_reference(outputs: torch.Tensor, routing: Routing, local: range) -> torch.Tensor:
    """Return [T, H] for outputs [T * top_k, H] in the order of the pairs.

    Those of experts outside `local` are undefined and add nothing: another rank has them.
    """
    is_local = (routing.experts >= local.start) & (routing.experts < local.stop)
    of_tokens = outputs.view(*routing.experts.shape, -1).float()
    weighted = torch.where(is_local.unsqueeze(-1), of_tokens * routing.weights.unsqueeze(-1), 0.0)
    return weighted.sum(dim=1).to(outputs.dtype)


def cpu_combine_experts(library: CDLL) -> Callable[[torch.Tensor, Routing, range], torch.Tensor]:
    """The compiled combine_experts."""
    native = library.kvasir_combine_experts

    def combine_experts(outputs: torch.Tensor, routing: Routing, local: range) -> torch.Tensor:
        if outputs.dtype not in DTYPE_CODES or not outputs.is_contiguous():
            warn_of_twin("combining experts", f"their outputs are {outputs.dtype} with strides {outputs.stride()}")
            return combine_experts_reference(outputs, routing, local)
        (num_tokens, top_k), width = routing.experts.shape, outputs.shape[1]
        out = torch.empty((num_tokens, width), dtype=outputs.dtype)
        native(
            *(DTYPE_CODES[outputs.dtype], outputs.data_ptr(), routing.weights.data_ptr(), routing.experts.data_ptr()),
            *(local.start, len(local), out.data_ptr(), num_tokens, top_k, width),
        )
        return out

    return combine_experts
