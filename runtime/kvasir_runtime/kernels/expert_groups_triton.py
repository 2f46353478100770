"""Sorting pairs by expert in Triton: one launch, whatever the routing; the torch twin is `group_by_expert_reference`.

Each program finds the place of one expert's pairs by counting those of the experts before it, so that none waits for
another and pairs keep their order.
"""

import torch
import triton
import triton.language as tl

from kvasir_runtime.kernels.expert_groups import ExpertGroups

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
