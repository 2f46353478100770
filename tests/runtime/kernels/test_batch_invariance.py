"""The contract that a row's numbers depend on nothing but the row: not on the others of its step, nor on how many."""

import pytest
import torch

from kvasir_runtime.kernels.linear import PATHS, Linear, make_weight
from kvasir_runtime.kernels.linear_weight import VARIANTS, has_onednn
from kvasir_runtime.kernels.native import load_library

MANY = 64
SHAPES = [(512, 384), (130, 200), (48, 33), (2064, 1024), (96, 4096)]
"""Outputs and inputs of weights, odd ones among them."""


def runs_here(path: str) -> bool:
    library = load_library()
    if path in VARIANTS:
        return library is not None and bool(library.kvasir_linear_has(VARIANTS[path]))
    return has_onednn() if path == "onednn" else True


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("path", [path for path in PATHS if runs_here(path)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_multiplied_alike_among_any_number_of_rows(path: str, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    linear = Linear(make_weight(noise(outputs, inputs, dtype=torch.bfloat16), path=path))
    x = noise(MANY, inputs, dtype=torch.bfloat16, seed=1)
    among_many = linear(x)
    assert [n for n in range(1, 41) if not torch.equal(linear(x[:n]), among_many[:n])] == []
