"""Where top_k and top_p cut: by a few candidates, as by sorting everything."""

import pytest
import torch

from kvasir_runtime.kernels.top_k_top_p import (
    LeastLikelyKept,
    least_likely_kept_of_candidates,
    least_likely_kept_reference,
)

VOCAB_SIZE = 400
WAYS = {"sorted": least_likely_kept_reference, "candidates": least_likely_kept_of_candidates}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def least_likely_kept(request: pytest.FixtureRequest) -> LeastLikelyKept:
    return request.param


def num_kept(least_likely_kept: LeastLikelyKept, probabilities: torch.Tensor, top_k: int, top_p: float) -> int:
    logits = (probabilities / probabilities.max()).log().unsqueeze(0)
    cut = least_likely_kept(logits, torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]))
    assert cut.shape == (1, 1)
    return int((logits >= cut).sum())


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (5, 1.0, 5),
        (2, 1.0, 2),
        (5, 0.39, 1),
        (5, 0.41, 2),
        (5, 0.69, 2),
        (5, 0.71, 3),
        (3, 0.85, 2),  # of the 0.82 that top_k leaves, 0.85 are reached by two
        (3, 0.86, 3),
        (5, 0.001, 1),
    ],
)
def test_keeps_the_fewest_that_add_up(
    top_k: int, top_p: float, expected: int, least_likely_kept: LeastLikelyKept
) -> None:
    probabilities = torch.tensor([0.3, 0.1, 0.4, 0.12, 0.08])
    assert num_kept(least_likely_kept, probabilities, top_k, top_p) == expected


def test_equally_likely_tokens_stay_together(least_likely_kept: LeastLikelyKept) -> None:
    assert num_kept(least_likely_kept, torch.tensor([0.4, 0.2, 0.2, 0.2]), 2, 1.0) == 4


def test_a_flat_distribution_keeps_its_share(least_likely_kept: LeastLikelyKept) -> None:
    probabilities = torch.linspace(1.0, 0.99, VOCAB_SIZE).softmax(0)
    assert num_kept(least_likely_kept, probabilities, VOCAB_SIZE, 0.9) == pytest.approx(0.9 * VOCAB_SIZE, abs=2)


def test_rows_are_cut_by_their_own_parameters() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((4, VOCAB_SIZE), generator=generator) * torch.tensor([[0.01], [1.0], [3.0], [1.0]])
    logits -= logits.amax(dim=-1, keepdim=True)
    top_k = torch.tensor([VOCAB_SIZE, 7, VOCAB_SIZE, 200], dtype=torch.int32)
    top_p = torch.tensor([0.95, 1.0, 0.5, 0.8])
    expected = least_likely_kept_reference(logits, top_k, top_p)
    torch.testing.assert_close(least_likely_kept_of_candidates(logits, top_k, top_p), expected)
