"""Pairs of a token and one of its experts, sorted by expert: the rows of a grouped product.

Pair p belongs to token p // top_k. With experts spread over ranks only pairs of this rank's experts have a place.
"""

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass

import torch


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
