"""Draws from given weights: which token holds a number, exactly as the torch twin finds it."""

import pytest
import torch
from tests.runtime.kernels.triton_device import GPU_MARKS, on_device
from torch import Tensor

from kvasir_runtime.kernels.look_up import LookUp, look_up_reference
from kvasir_runtime.kernels.look_up_triton import TritonLookUp

TRITON = TritonLookUp()


def on_gpu(scaled: Tensor, cut: Tensor, draws: Tensor) -> Tensor:
    return TRITON(on_device(scaled), on_device(cut), on_device(draws)).cpu()


def keep_all(num_rows: int) -> Tensor:
    return torch.full((num_rows,), float("-inf"))


WAYS = [
    pytest.param(look_up_reference, id="integers"),
    pytest.param(on_gpu, id="triton", marks=GPU_MARKS),
]


@pytest.mark.parametrize("look_up", WAYS)
def test_each_token_has_its_share(look_up: LookUp) -> None:
    """Of 4: two blocks apart, with tokens that are impossible between them and behind."""
    weights = torch.zeros(1, 5000)
    weights[0, [3, 4, 4321]] = torch.tensor([0.5, 1.0, 0.5])
    draws = torch.tensor([0.0, 0.249, 0.25, 0.5, 0.7499, 0.75, 1 - 2.0**-48], dtype=torch.float64)
    found = look_up(weights.log().expand(len(draws), -1).contiguous(), keep_all(len(draws)), draws)
    assert found.tolist() == [3, 3, 4, 4, 4, 4321, 4321]


@pytest.mark.parametrize("look_up", WAYS)
@pytest.mark.parametrize("logit", [float("-inf"), float("nan")])
def test_where_no_token_is_possible_the_first_is_drawn(logit: float, look_up: LookUp) -> None:
    scaled = torch.full((2, 300), logit)
    scaled[1] = float("-inf")
    scaled[1, 7] = 0.0
    draws = torch.tensor([0.9, 0.9], dtype=torch.float64)
    assert look_up(scaled, keep_all(2), draws).tolist() == [0, 7]


@pytest.mark.parametrize("look_up", WAYS)
def test_what_is_cut_is_not_drawn(look_up: LookUp) -> None:
    scaled = torch.tensor([-1.0, 0.0, -0.5, -0.51]).expand(3, -1).contiguous()
    draws = torch.tensor([0.0, 0.62, 1 - 2.0**-48], dtype=torch.float64)
    assert look_up(scaled, torch.full((3,), -0.5), draws).tolist() == [1, 1, 2]


@pytest.mark.parametrize("kernel", [pytest.param(on_gpu, marks=GPU_MARKS, id="triton")])
def test_tokens_are_exactly_the_twins_in_any_batch(kernel: LookUp) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 5000, generator=random) * torch.linspace(0, 9, 20).unsqueeze(1)
    scaled, cut = logits - logits.amax(1, keepdim=True), -torch.arange(20.0)
    draws = torch.rand(20, generator=random, dtype=torch.float64)
    draws[:2] = torch.tensor([0.0, 1 - 2.0**-48])
    expected = look_up_reference(scaled, cut, draws)
    assert torch.equal(kernel(scaled, cut, draws), expected)
    assert torch.equal(kernel(scaled[5:6], cut[5:6], draws[5:6]), expected[5:6])
