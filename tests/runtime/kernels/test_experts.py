"""The compiled kernels around the products of a mixture of experts agree with their torch twins."""

import pytest
import torch

from kvasir_runtime.kernels.experts import Routing
from kvasir_runtime.kernels.ops import cpu_ops, reference_ops

CPU, REFERENCE = cpu_ops(), reference_ops()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8), (5, 5), (1, 1)])
def test_routes_agree(num_experts: int, top_k: int, dtype: torch.dtype, renormalises: bool) -> None:
    logits = torch.randn(37, num_experts).mul(4).to(dtype)  # in bfloat16 many are equal
    ours, twin = CPU.route(logits, top_k, renormalises), REFERENCE.route(logits, top_k, renormalises)
    assert torch.equal(ours.experts, twin.experts)
    torch.testing.assert_close(ours.weights, twin.weights, atol=1e-6, rtol=1e-5)


def test_weights_are_shares_among_all_experts_or_among_the_selected() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    shares = logits[0].softmax(-1)
    routing = CPU.route(logits, 3, False)
    assert routing.experts.tolist() == [[1, 3, 2]]
    torch.testing.assert_close(routing.weights, shares[[1, 3, 2]][None])
    torch.testing.assert_close(CPU.route(logits, 3, True).weights, routing.weights / routing.weights.sum())


def test_logits_that_are_no_numbers_still_name_experts_that_exist() -> None:
    logits = torch.full((2, 4), torch.nan)
    logits[1, 2] = 1.0
    experts = CPU.route(logits, 2, True).experts
    assert experts.min() >= 0
    assert experts.max() < 4
    assert experts[1, 0] == 2


@pytest.mark.parametrize("local", [range(8), range(2, 5), range(7, 8)], ids=str)
def test_groups_agree(local: range) -> None:
    experts = torch.randint(8, (23, 3), dtype=torch.int32)
    ours, twin = CPU.group_by_expert(experts, local), REFERENCE.group_by_expert(experts, local)
    num_here = int(twin.ends[-1])
    assert torch.equal(ours.ends, twin.ends)
    assert torch.equal(ours.pairs[:num_here], twin.pairs[:num_here])
    assert ours.top_k == twin.top_k == 3


def test_pairs_of_one_expert_keep_their_order_and_others_have_no_place() -> None:
    experts = torch.tensor([[2, 0], [1, 2], [5, 2]], dtype=torch.int32)
    groups = REFERENCE.group_by_expert(experts, range(1, 4))
    assert groups.ends.tolist() == [1, 4, 4]
    assert groups.pairs[:4].tolist() == [2, 0, 3, 5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 19])
def test_sums_agree_and_leave_out_experts_elsewhere(num_tokens: int, dtype: torch.dtype) -> None:
    experts = torch.randint(6, (num_tokens, 4), dtype=torch.int32)
    routing = Routing(experts, torch.rand(num_tokens, 4))
    outputs = torch.randn(num_tokens * 4, 2000).to(dtype)
    local = range(1, 5)
    outputs[~((experts >= 1) & (experts < 5)).flatten()] = torch.nan
    ours, twin = (ops.combine_experts(outputs, routing, local) for ops in (CPU, REFERENCE))
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, twin)
