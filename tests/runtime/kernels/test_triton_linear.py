"""The Triton linear layer against its torch twin, and that a row's result is its own."""

import pytest
import torch
from tests.runtime.kernels.triton_device import DEVICE, DTYPES, GPU_MARKS, TOLERANCES, randn

from kvasir_runtime.kernels.experts import group_by_expert_reference
from kvasir_runtime.kernels.grouped_linear_triton import TritonExperts
from kvasir_runtime.kernels.linear import PlainWeight
from kvasir_runtime.kernels.linear_triton import TritonWeight

pytestmark = GPU_MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 64), (3, 70, 100), (65, 130, 33)])
def test_agrees_with_its_twin(rows: int, outputs: int, inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight, x = randn(outputs, inputs, dtype=dtype) / inputs**0.5, randn(rows, inputs, dtype=dtype)
    bias = randn(outputs, dtype=dtype) if has_bias else None
    ours, twin = (form(weight, bias)(x) for form in (TritonWeight, PlainWeight))
    torch.testing.assert_close(ours, twin, **TOLERANCES[dtype])


def test_reads_rows_that_are_not_adjacent_and_of_any_dimensions() -> None:
    plain, wide = randn(40, 48), randn(2, 3, 96)
    weight = TritonWeight(plain, None)
    assert torch.equal(weight(wide[..., :48]), weight(wide[..., :48].contiguous()))
    assert weight(wide[:0, :, :48]).shape == (0, 3, 40)
    assert torch.equal(weight.rows(torch.tensor([3, 0], device=DEVICE)), plain[[3, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_multiplied_alike_among_any_number_of_rows(dtype: torch.dtype) -> None:
    weight, x = TritonWeight(randn(70, 200, dtype=dtype), None), randn(70, 200, dtype=dtype)
    among_many = weight(x)
    for n in (1, 2, 5, 16, 33, 64):
        assert torch.equal(weight(x[:n]), among_many[:n])


@pytest.mark.parametrize("dtype", DTYPES)
def test_so_are_the_products_of_experts_where_tiles_have_one_shape(dtype: torch.dtype) -> None:
    experts = TritonExperts(iter(randn(2, 40, 200, dtype=dtype)), 2, has_one_tile=True)
    x, chosen = randn(80, 200, dtype=dtype), torch.randint(2, (80, 1), dtype=torch.int32).to(DEVICE)

    def products(num_tokens: int) -> torch.Tensor:
        groups = group_by_expert_reference(chosen[:num_tokens], range(2))
        return experts.multiply_tokens(x[:num_tokens], groups)[groups.pairs.long().argsort()]

    among_many = products(80)
    for n in (1, 7, 40):
        assert torch.equal(products(n), among_many[:n])
