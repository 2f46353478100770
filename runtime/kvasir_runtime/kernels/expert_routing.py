"""Which experts each token goes to: the softmax over its router logits, the largest few, and how much each counts."""

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
