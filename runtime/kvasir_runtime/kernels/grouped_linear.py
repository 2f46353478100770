"""The products of a mixture of experts: y = x @ W[e]^T, where each row of x belongs to an expert e of its own.

Rows are sorted by expert (`ExpertGroups`), and an expert without rows costs nothing. The forms differ in how weights
are kept: one by one, as any linear layer's are (the plain twin), in our packed panels with one call for all
(csrc/linear.cpp), or on a GPU in one tensor (`grouped_linear_triton`).
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL
from typing import Protocol

import torch

from kvasir_runtime.kernels.experts import ExpertGroups
from kvasir_runtime.kernels.linear import VARIANTS, Linear, NativeWeight, Panels, plain_weight
from kvasir_runtime.kernels.linear_choice import choose_variant
from kvasir_runtime.kernels.native import load_library


class GroupedWeight(Protocol):
    """Of experts of one shape [N, K]."""

    @property
    def name(self) -> str: ...

    def multiply_tokens(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        """From tokens x [num_tokens, K] to their pairs, sorted by expert: [num_pairs, N]."""

    def multiply_pairs(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        """From pairs x [num_pairs, K], sorted by expert, to pairs in the order of their numbers: [num_pairs, N].

        The rows of pairs whose expert is elsewhere are undefined.
        """


GroupedWeightFactory = Callable[[Iterator[torch.Tensor], int], GroupedWeight]


def make_grouped_weight(
    weights: Iterator[torch.Tensor], num_experts: int, path: str = "auto", *, batch_invariant: bool = False
) -> GroupedWeight:
    """Take over the weights [N, K] of so many experts, at least one; each is asked for when the last has its place.

    `path` and `batch_invariant` as for `make_weight`. Raises ConfigurationError for one that cannot run here.
    """
    first = next(weights)
    weights = itertools.chain([first], weights)
    if first.device.type == "cuda":  # importing Triton takes a second, for nothing on CPUs
        from kvasir_runtime.kernels.grouped_linear_triton import TritonExperts

        return TritonExperts(weights, num_experts, has_one_tile=batch_invariant)
    library = load_library()
    variant = choose_variant(library, path, first)
    if library is None or variant is None:
        return SeparateExperts([plain_weight(weight, None) for weight in weights], first.shape[0])
    return PackedExperts(library, weights, num_experts, variant)


class SeparateExperts:
    """Weights of any form, one product for each expert that has rows. It reads the groups on the host."""

    def __init__(self, weights: Sequence[Linear], num_outputs: int) -> None:
        self._weights = weights
        self._num_outputs = num_outputs

    @property
    def name(self) -> str:
        return f"{self._weights[0].name} by expert"

    def multiply_tokens(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        out = x.new_empty((len(groups.pairs), self._num_outputs))
        for weight, places in self._busy(groups):
            out[places] = weight(x[groups.pairs[places] // groups.top_k])
        return out

    def multiply_pairs(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        out = x.new_empty((len(groups.pairs), self._num_outputs))
        for weight, places in self._busy(groups):
            out[groups.pairs[places]] = weight(x[places])
        return out

    def _busy(self, groups: ExpertGroups) -> Iterator[tuple[Linear, slice]]:
        """The experts that have rows, and which."""
        ends = groups.ends.tolist()
        for weight, start, end in zip(self._weights, [0, *ends], ends, strict=False):
            if end > start:
                yield weight, slice(start, end)


class PackedExperts:
    """Our panels of all experts, multiplied in one call on all threads."""

    def __init__(self, library: CDLL, weights: Iterator[torch.Tensor], num_experts: int, variant: str) -> None:
        """`variant` as of a `PackedWeight`."""
        self._library = library
        self._variant = variant
        self._native = (NativeWeight * num_experts)()
        self._panels = []
        for index, weight in enumerate(weights):
            self._num_outputs = weight.shape[0]
            self._panels.append(Panels(library, weight, None))
            self._native[index] = self._panels[-1].native

    @property
    def name(self) -> str:
        return f"packed:{self._variant}"

    def multiply_tokens(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        return self._multiply(x, groups, gathers=True)

    def multiply_pairs(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        return self._multiply(x, groups, gathers=False)

    def _multiply(self, x: torch.Tensor, groups: ExpertGroups, *, gathers: bool) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((len(groups.pairs), self._num_outputs), dtype=torch.bfloat16)
        self._library.kvasir_grouped_linear(
            *(ctypes.addressof(self._native), len(self._native), groups.ends.data_ptr(), groups.pairs.data_ptr()),
            *(groups.top_k, gathers, VARIANTS[self._variant]),
            *(x.data_ptr(), x.stride(0), out.data_ptr(), self._num_outputs),
        )
        return out
