"""Every form of experts' weights gives the plain twin's products, for any number of rows an expert, and none."""

import pytest
import torch

from kvasir_runtime.kernels.experts import ExpertGroups, group_by_expert_reference
from kvasir_runtime.kernels.grouped_linear import GroupedWeight, SeparateExperts, make_grouped_weight
from kvasir_runtime.kernels.linear import VARIANTS, PlainWeight
from kvasir_runtime.kernels.native import load_library

LIBRARY = load_library()
assert LIBRARY is not None
NATIVE = [
    pytest.param(
        name, marks=pytest.mark.skipif(not LIBRARY.kvasir_linear_has(code), reason=f"this processor cannot run {name}")
    )
    for name, code in VARIANTS.items()
]
SHAPES = [(48, 64), (40, 72), (336, 768)]
NUM_EXPERTS = 6


def experts_weights(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(NUM_EXPERTS, outputs, inputs).to(dtype)


def uneven_experts(num_tokens: int) -> torch.Tensor:
    """Two a token, of which expert 0 is always one, and 3 and 5 never."""
    second = torch.tensor([1, 2, 4])[torch.randint(3, (num_tokens,))]
    return torch.stack((second, torch.zeros(num_tokens, dtype=torch.long)), 1).int()


def expected(weights: torch.Tensor, x: torch.Tensor, groups: ExpertGroups, experts: torch.Tensor) -> torch.Tensor:
    """Of tokens, by pair in the order of their numbers."""
    tokens = x.repeat_interleave(groups.top_k, dim=0).double()
    return torch.einsum("pk,pnk->pn", tokens, weights.double()[experts.flatten().long()])


def check(grouped: GroupedWeight, weights: torch.Tensor, num_tokens: int) -> None:
    experts = uneven_experts(num_tokens)
    groups = group_by_expert_reference(experts, range(NUM_EXPERTS))
    x = torch.randn(num_tokens, weights.shape[2]).to(weights.dtype)
    wanted = expected(weights, x, groups, experts)
    order = groups.pairs.long()
    tolerance = {"atol": 1e-3, "rtol": 1e-4} if weights.dtype == torch.float32 else {"atol": 0.1, "rtol": 0.01}
    torch.testing.assert_close(grouped.multiply_tokens(x, groups).double(), wanted[order], **tolerance)
    by_expert = x.repeat_interleave(2, dim=0)[order]
    torch.testing.assert_close(grouped.multiply_pairs(by_expert, groups).double(), wanted, **tolerance)


@pytest.mark.parametrize("path", ["torch", "auto", *NATIVE])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_path_gives_the_products(shape: tuple[int, int], path: str) -> None:
    weights = experts_weights(*shape)
    grouped = make_grouped_weight(iter(weights.clone()), NUM_EXPERTS, path)
    for num_tokens in (1, 2, 5, 21, 70, 300):
        check(grouped, weights, num_tokens)


def test_auto_keeps_bfloat16_in_one_call_for_all_experts() -> None:
    assert make_grouped_weight(iter(experts_weights(48, 64)), NUM_EXPERTS).name.startswith("packed:")


@pytest.mark.parametrize("path", NATIVE)
def test_threads_share_out_the_products(path: str, threads: int) -> None:
    weights = experts_weights(336, 768)
    check(make_grouped_weight(iter(weights.clone()), NUM_EXPERTS, path), weights, 40)


def test_float32_is_multiplied_by_torch() -> None:
    weights = experts_weights(48, 64, torch.float32)
    grouped = make_grouped_weight(iter(weights), NUM_EXPERTS)
    assert grouped.name == "torch by expert"
    check(grouped, weights, 20)


@pytest.mark.parametrize("path", ["torch", "auto"])
def test_pairs_of_experts_elsewhere_are_neither_read_nor_written(path: str) -> None:
    weights = experts_weights(48, 64)
    local = range(2, 4)
    grouped = make_grouped_weight(iter(weights[2:4].clone()), 2, path)
    experts = torch.tensor([[2, 0], [5, 3]], dtype=torch.int32)
    groups = group_by_expert_reference(experts, local)
    x = torch.randn(2, 64).bfloat16()
    products = grouped.multiply_tokens(x, groups)
    for place, (token, expert) in enumerate(((0, 2), (1, 3))):
        wanted = x[token].double() @ weights[expert].double().T
        torch.testing.assert_close(products[place].double(), wanted, atol=0.1, rtol=0.01)


class NotToBeUsed:
    name = "not to be used"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"an expert without rows was given {len(x)}")

    rows = __call__


def test_an_expert_without_rows_is_not_computed() -> None:
    weights = experts_weights(48, 64)
    forms = [NotToBeUsed() if index in (3, 5) else PlainWeight(weight, None) for index, weight in enumerate(weights)]
    check(SeparateExperts(forms, 48), weights, 9)
