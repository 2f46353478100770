"""The steps of a draw: numbers by the published answers, where top_k and top_p cut, which token holds a number."""

import pytest
import torch
from torch import Tensor

from kvasir_runtime.kernels.draw import least_likely_kept_reference, look_up_reference, philox4x32
from kvasir_runtime.kernels.draw import uniform_reference as uniform

VOCAB_SIZE = 400


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


def test_known_answers_of_the_random123_library() -> None:
    zeros = philox4x32(words(0, 0, 0, 0), words(0, 0))
    ones = philox4x32(words(*[0xFFFFFFFF] * 4), words(*[0xFFFFFFFF] * 2))
    assert [int(word[0]) for word in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word[0]) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_a_draw_is_the_48_upper_bits_of_its_counters_first_words() -> None:
    assert uniform(torch.tensor([0]), torch.tensor([0])).item() == 0x6627E8D5E169 * 2.0**-48


def test_every_bit_of_seed_and_position_counts() -> None:
    bits = torch.tensor([2**i if i < 63 else -(2**63) for i in range(64)])
    zeros = torch.zeros_like(bits)
    draws = torch.cat((uniform(bits, zeros), uniform(zeros, bits), uniform(zeros[:1], zeros[:1])))
    assert len(set(draws.tolist())) == 129


def test_a_draw_depends_on_its_own_seed_and_position_alone() -> None:
    seeds, positions = torch.tensor([7, -1, 7]), torch.tensor([3, 4, 2**33])
    together = uniform(seeds, positions).tolist()
    assert together == [uniform(seeds[i : i + 1], positions[i : i + 1]).item() for i in range(3)]


def test_draws_are_spread_evenly_over_zero_to_one() -> None:
    draws = uniform(torch.full((20_000,), 5), torch.arange(20_000))
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = torch.histc(draws, bins=10, min=0, max=1)
    assert (counts - 2_000).abs().max() < 200  # 4.7 standard deviations


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
