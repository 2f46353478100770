"""The Triton kernels of a mixture of experts against their torch twins."""

import functools

import pytest
import torch
from tests.runtime.kernels.triton_device import DEVICE, DTYPES, GPU_MARKS, TOLERANCES, randn

from kvasir_runtime.kernels.experts import (
    Routing,
    combine_experts_reference,
    group_by_expert_reference,
    route_reference,
)
from kvasir_runtime.kernels.experts_triton import triton_combine_experts, triton_group_by_expert, triton_route
from kvasir_runtime.kernels.grouped_linear import SeparateExperts
from kvasir_runtime.kernels.grouped_linear_triton import (
    FEW_ROWS,
    MANY_FROM,
    MANY_ROWS,
    TritonExperts,
    choose_tile,
    max_tiles,
)
from kvasir_runtime.kernels.linear import PlainWeight

pytestmark = GPU_MARKS


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_experts(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    return torch.randint(num_experts, (num_tokens, top_k), dtype=torch.int32).to(DEVICE)


@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 6)])
def test_routes_agree(num_experts: int, top_k: int, dtype: torch.dtype, renormalises: bool) -> None:
    logits = randn(5, num_experts, dtype=dtype)
    logits[0, 3] = logits[0, 5] = 9.0  # of equals the first
    ours, twin = triton_route(logits, top_k, renormalises), route_reference(logits, top_k, renormalises)
    assert torch.equal(ours.experts, twin.experts)
    torch.testing.assert_close(ours.weights, twin.weights, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which the interpreter computes with
def test_a_token_of_no_numbers_gets_experts_that_exist_and_leaves_the_others_alone() -> None:
    """As the padding of a CUDA graph may be."""
    logits = randn(3, 60)
    alone = triton_route(logits[:1], 6, True)
    logits[1], logits[2, 7] = torch.nan, torch.nan
    routing = triton_route(logits, 6, True)
    assert ((routing.experts >= 0) & (routing.experts < 60)).all()
    assert torch.equal(routing.experts[0], alone.experts[0])
    assert torch.equal(routing.weights[0], alone.weights[0])


@pytest.mark.parametrize("local", [range(6), range(2, 5)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 700])
def test_groups_agree_also_over_several_blocks_of_pairs(num_tokens: int, local: range) -> None:
    experts = random_experts(num_tokens, 2, 6)
    ours, twin = triton_group_by_expert(experts, local), group_by_expert_reference(experts, local)
    num_here = int(twin.ends[-1])
    assert torch.equal(ours.ends, twin.ends)
    assert torch.equal(ours.pairs[:num_here], twin.pairs[:num_here])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_agree_and_leave_out_experts_elsewhere(dtype: torch.dtype) -> None:
    experts = random_experts(3, 4, 6)
    routing = Routing(experts, torch.rand(3, 4, device=DEVICE))
    outputs = randn(12, 1100, dtype=dtype)
    outputs[~((experts >= 1) & (experts < 5)).flatten()] = torch.nan
    ours, twin = (
        combine(outputs, routing, range(1, 5)) for combine in (triton_combine_experts, combine_experts_reference)
    )
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, twin, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_products_agree(num_tokens: int, dtype: torch.dtype) -> None:
    """Of few and of many rows, the latter over two tiles of one expert; expert 2 has none, another is elsewhere."""
    weights = randn(3, 136, 80, dtype=dtype)
    experts = torch.tensor([1, 2, 4])[torch.randint(3, (num_tokens, 2))].int().to(DEVICE)
    experts[:, 0] = 1
    groups = group_by_expert_reference(experts, range(1, 4))
    assert choose_tile(len(groups.pairs), 3) == (MANY_ROWS if num_tokens == 70 else FEW_ROWS)
    num_here = int(groups.ends[-1])
    forms = TritonExperts(iter(weights), 3), SeparateExperts([PlainWeight(weight, None) for weight in weights], 136)
    x, pairs = randn(num_tokens, 80, dtype=dtype), randn(num_tokens * 2, 80, dtype=dtype)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 1e-2}
    ours, twin = (form.multiply_tokens(x, groups)[:num_here] for form in forms)
    torch.testing.assert_close(ours, twin, **tolerance)
    here = groups.pairs[:num_here].long()
    ours, twin = (form.multiply_pairs(pairs, groups)[here] for form in forms)
    torch.testing.assert_close(ours, twin, **tolerance)


@functools.cache
def most_tiles(num_pairs: int, num_experts: int) -> int:
    """Of four rows, over all ways to share out the pairs."""
    if num_experts == 1:
        return -(-num_pairs // 4)
    return max(-(-first // 4) + most_tiles(num_pairs - first, num_experts - 1) for first in range(num_pairs + 1))


def test_the_grid_has_room_for_any_routing_and_no_more() -> None:
    for num_experts in (1, 3, 8):
        for num_pairs in range(1, 40):
            assert max_tiles(num_pairs, num_experts, 4) == most_tiles(num_pairs, num_experts)


def test_the_tile_follows_from_shapes_alone() -> None:
    assert choose_tile(MANY_FROM * 8 - 1, 8) == FEW_ROWS
    assert choose_tile(MANY_FROM * 8, 8) == MANY_ROWS
