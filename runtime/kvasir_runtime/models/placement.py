"""Where and with what a model computes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.kernels.linear import make_weight
from kvasir_runtime.kernels.linear_weight import LinearWeight
from kvasir_runtime.kernels.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    make_weight: Callable[[Tensor, Tensor | None], LinearWeight] = make_weight
    """The compute form of a float weight and bias, both handed over."""
