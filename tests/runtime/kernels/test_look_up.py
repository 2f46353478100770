"""Draws from given weights: which token holds a number."""

import pytest
import torch
from torch import Tensor

from kvasir_runtime.kernels.look_up import look_up_reference


def keep_all(num_rows: int) -> Tensor:
    return torch.full((num_rows,), float("-inf"))


def test_each_token_has_its_share() -> None:
    """Of 4: two blocks apart, with tokens that are impossible between them and behind."""
    weights = torch.zeros(1, 5000)
    weights[0, [3, 4, 4321]] = torch.tensor([0.5, 1.0, 0.5])
    draws = torch.tensor([0.0, 0.249, 0.25, 0.5, 0.7499, 0.75, 1 - 2.0**-48], dtype=torch.float64)
    found = look_up_reference(weights.log().expand(len(draws), -1).contiguous(), keep_all(len(draws)), draws)
    assert found.tolist() == [3, 3, 4, 4, 4, 4321, 4321]


@pytest.mark.parametrize("logit", [float("-inf"), float("nan")])
def test_where_no_token_is_possible_the_first_is_drawn(logit: float) -> None:
    scaled = torch.full((2, 300), logit)
    scaled[1] = float("-inf")
    scaled[1, 7] = 0.0
    draws = torch.tensor([0.9, 0.9], dtype=torch.float64)
    assert look_up_reference(scaled, keep_all(2), draws).tolist() == [0, 7]


def test_what_is_cut_is_not_drawn() -> None:
    scaled = torch.tensor([-1.0, 0.0, -0.5, -0.51]).expand(3, -1).contiguous()
    draws = torch.tensor([0.0, 0.62, 1 - 2.0**-48], dtype=torch.float64)
    assert look_up_reference(scaled, torch.full((3,), -0.5), draws).tolist() == [1, 1, 2]


def test_a_draw_at_the_very_end_meets_a_token_that_is_possible() -> None:
    logits = torch.randn((200, 300), generator=torch.Generator().manual_seed(0))
    logits[:, 100:128] = logits[:, 250:] = float("-inf")
    scaled, last = logits - logits.amax(1, keepdim=True), torch.full((200,), 1 - 2.0**-48, dtype=torch.float64)
    assert set(look_up_reference(scaled, keep_all(200), last).tolist()) <= {*range(100), *range(128, 250)}
