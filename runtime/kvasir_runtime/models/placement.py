"""Where and with what a model computes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvasir_runtime.kernels.grouped_linear import GroupedWeightFactory, make_grouped_weight
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.linear_choice import make_weight
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.parallel.collectives import Collectives, SingleRank


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    make_weight: Callable[[Tensor, Tensor | None], Linear] = make_weight
    """The compute form of a float weight and bias, both handed over."""
    make_grouped_weight: GroupedWeightFactory = make_grouped_weight
    """The same of the weights of several experts, which are read one by one."""
    tensor: Collectives = field(default_factory=SingleRank)
    """The ranks that share every layer: each holds its part of the weights, and they add up or join their results."""
    expert_parallel: bool = False
    """Whether these ranks share out whole experts, instead of cutting each."""
