"""Where top_k and top_p cut: by histograms of many programs, as by sorting everything."""

import pytest
import torch
from tests.runtime.kernels.triton_device import GPU_MARKS, on_device
from torch import Tensor

from kvasir_runtime.kernels.top_k_top_p import LeastLikelyKept, least_likely_kept_reference
from kvasir_runtime.kernels.top_k_top_p_triton import TritonLeastLikelyKept

VOCAB_SIZE = 400
TRITON = TritonLeastLikelyKept()


def on_gpu(scaled: Tensor, least: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    limits = (None if limit is None else on_device(limit) for limit in (top_k, top_p))
    return TRITON(on_device(scaled), on_device(least), *limits).cpu()


WAYS = [
    pytest.param(least_likely_kept_reference, id="sorted"),
    pytest.param(on_gpu, id="triton", marks=GPU_MARKS),
]


@pytest.fixture(params=WAYS)
def least_likely_kept(request: pytest.FixtureRequest) -> LeastLikelyKept:
    return request.param


def num_kept(
    least_likely_kept: LeastLikelyKept, probabilities: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0
) -> int:
    scaled, least = (probabilities / probabilities.max()).log().unsqueeze(0), torch.tensor([min_p]).log()
    cut = least_likely_kept(scaled, least, torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]))
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
def test_keeps_the_fewest_that_add_up(
    top_k: int, top_p: float, expected: int, least_likely_kept: LeastLikelyKept
) -> None:
    probabilities = torch.tensor([0.3, 0.1, 0.4, 0.12, 0.08])
    assert num_kept(least_likely_kept, probabilities, top_k, top_p) == expected


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
def test_equally_likely_tokens_stay_together(
    top_k: int, top_p: float, expected: int, least_likely_kept: LeastLikelyKept
) -> None:
    probabilities = torch.tensor([0.5, 0.1875, 0.1875, 0.09375, 0.03125])
    assert num_kept(least_likely_kept, probabilities, top_k, top_p) == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [(5, 1.0, 0.26, 3), (2, 1.0, 0.26, 2), (5, 0.86, 0.26, 3), (5, 0.85, 0.26, 2), (5, 0.75, 0.2, 3)],
)
def test_min_p_cuts_before_the_others(
    top_k: int, top_p: float, min_p: float, expected: int, least_likely_kept: LeastLikelyKept
) -> None:
    probabilities = torch.tensor([0.3, 0.1, 0.4, 0.12, 0.08])  # 0.82 are left by a min_p above a quarter
    assert num_kept(least_likely_kept, probabilities, top_k, top_p, min_p) == expected


def test_a_flat_distribution_keeps_its_share(least_likely_kept: LeastLikelyKept) -> None:
    probabilities = torch.linspace(1.0, 0.99, VOCAB_SIZE).softmax(0)
    assert num_kept(least_likely_kept, probabilities, VOCAB_SIZE, 0.9) == pytest.approx(0.9 * VOCAB_SIZE, abs=2)


def hostile_logits() -> Tensor:
    """Over several programs: flat and peaked rows, ties, tokens that are impossible, and a row that is not a number."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 5000, generator=random) * torch.tensor([0.01, 1, 3, 9, 1, 30, 1, 2]).unsqueeze(1)
    logits[2] = logits[2].round()
    logits[4, 100:] = float("-inf")
    logits[5, 1:3] = logits[5].amax() + 20
    logits[6] = 1.0
    logits[7] = float("nan")
    return logits - logits.amax(dim=1, keepdim=True)


def kept(scaled: Tensor, cut: Tensor) -> Tensor:
    return scaled >= cut.unsqueeze(1)


def limits(*, has_k: bool, has_p: bool) -> tuple[Tensor | None, Tensor | None]:
    top_k = torch.tensor([5000, 7, 40, 5000, 60, 2, 1, 5000], dtype=torch.int32)
    top_p = torch.tensor([0.9, 1.0, 0.95, 0.5, 0.9999, 0.3, 0.7, 0.9])
    return top_k if has_k else None, top_p if has_p else None


@pytest.mark.parametrize(("has_k", "has_p"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kernel", [pytest.param(on_gpu, marks=GPU_MARKS, id="triton")])
def test_the_tokens_kept_are_exactly_the_twins(kernel: LeastLikelyKept, has_k: bool, has_p: bool) -> None:
    scaled, (top_k, top_p) = hostile_logits(), limits(has_k=has_k, has_p=has_p)
    least = torch.tensor([float("-inf"), -2.0]).repeat(4)
    expected = kept(scaled, least_likely_kept_reference(scaled, least, top_k, top_p))
    assert torch.equal(kept(scaled, kernel(scaled, least, top_k, top_p))[:-1], expected[:-1])
    for row in range(len(scaled) - 1):  # and of one row what it is among others
        own = (None if limit is None else limit[row : row + 1] for limit in (top_k, top_p))
        alone = scaled[row : row + 1]
        assert torch.equal(kept(alone, kernel(alone, least[row : row + 1], *own)), expected[row : row + 1])
