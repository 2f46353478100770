"""Where top_k and top_p cut."""

import pytest
import torch

from kvasir_runtime.kernels.top_k_top_p import least_likely_kept_reference

VOCAB_SIZE = 400


def num_kept(probabilities: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> int:
    scaled, least = (probabilities / probabilities.max()).log().unsqueeze(0), torch.tensor([min_p]).log()
    cut = least_likely_kept_reference(scaled, least, torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]))
    assert cut.shape == (1,)
    return int((scaled >= cut).sum())


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
def test_keeps_the_fewest_that_add_up(top_k: int, top_p: float, expected: int) -> None:
    probabilities = torch.tensor([0.3, 0.1, 0.4, 0.12, 0.08])
    assert num_kept(probabilities, top_k, top_p) == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (1, 1.0, 1),
        (2, 1.0, 3),  # the second and the third are equally likely
        (3, 1.0, 3),
        (4, 1.0, 4),
        (5, 0.499, 1),  # the first's probability is a half, which is enough
        (5, 0.501, 3),
        (5, 1e-9, 1),
        (4, 0.999, 4),
        (2, 0.999, 3),  # of all that top_k leaves
        (5, 1.0, 5),
    ],
)
def test_equally_likely_tokens_stay_together(top_k: int, top_p: float, expected: int) -> None:
    probabilities = torch.tensor([0.5, 0.1875, 0.1875, 0.09375, 0.03125])
    assert num_kept(probabilities, top_k, top_p) == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [(5, 1.0, 0.26, 3), (2, 1.0, 0.26, 2), (5, 0.86, 0.26, 3), (5, 0.85, 0.26, 2), (5, 0.75, 0.2, 3)],
)
def test_min_p_cuts_before_the_others(top_k: int, top_p: float, min_p: float, expected: int) -> None:
    probabilities = torch.tensor([0.3, 0.1, 0.4, 0.12, 0.08])  # 0.82 are left by a min_p above a quarter
    assert num_kept(probabilities, top_k, top_p, min_p) == expected


def test_a_flat_distribution_keeps_its_share() -> None:
    probabilities = torch.linspace(1.0, 0.99, VOCAB_SIZE).softmax(0)
    assert num_kept(probabilities, VOCAB_SIZE, 0.9) == pytest.approx(0.9 * VOCAB_SIZE, abs=2)
