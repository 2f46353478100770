"""The linear layer y = x @ W^T + b, on the compute path that a short measurement at load found fastest for its shape.

bfloat16 weights on the CPU are kept once, in the layout of the chosen path, and the original is let go. All other types
and devices go through torch as they are, so that float32 results stay exact.
"""

from dataclasses import dataclass

import torch

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.linear_choice import choose_weight
from kvasir_runtime.kernels.linear_weight import (
    VARIANTS,
    LinearWeight,
    OneDnnWeight,
    PackedWeight,
    PlainWeight,
    check_onednn,
)
from kvasir_runtime.kernels.native import load_library

PATHS = ("auto", "torch", "onednn", "packed", *VARIANTS)


@dataclass(frozen=True, slots=True)
class Linear:
    """Call it with x [M, K], any M; the weight's rows also serve as a tied embedding."""

    weight: LinearWeight

    @property
    def path(self) -> str:
        """What computes it, for logs and benchmarks."""
        return self.weight.name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.multiply(x)

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The weight's rows [T, K] for token ids int64 [T]: the input embedding of a model with tied embeddings."""
        return self.weight.rows(token_ids)


def make_weight(
    weight: torch.Tensor, bias: torch.Tensor | None = None, path: str = "auto", *, batch_invariant: bool = False
) -> LinearWeight:
    """Take weight [N, K] and bias [N] over; the caller should drop its own references.

    `path` is auto (measure), torch, onednn, packed (our layout, the fastest instructions for it), or one of
    fma, dot, amx (our layout, these instructions). `batch_invariant` asks for one order of summation for any number of
    rows on GPUs, too. Raises ConfigurationError for a path that cannot run here.
    """
    if batch_invariant and weight.device.type == "cuda":  # importing Triton takes a second, for nothing on CPUs
        from kvasir_runtime.kernels.linear_triton import TritonWeight

        return TritonWeight(weight, bias)
    if path not in PATHS:
        raise ConfigurationError(f"linear path {path!r} is not known; expected one of {', '.join(PATHS)}")
    if path == "torch" or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return PlainWeight(weight, bias)
    library = load_library()
    if path == "onednn":
        check_onednn()
        return OneDnnWeight(weight, bias)
    if path == "auto" or (path == "packed" and library is not None):
        return choose_weight(library, weight, bias)
    if library is None:
        raise ConfigurationError(f"linear path {path!r} needs compiled kernels but no compiler was found; install g++")
    if not library.kvasir_linear_has(VARIANTS[path]):
        raise ConfigurationError(f"linear path {path!r} needs instructions that this CPU or compiler lacks; use 'auto'")
    return PackedWeight(library, weight, bias, path)
