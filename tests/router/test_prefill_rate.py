import random

import pytest

from kvasir_router.prefill_rate import PrefillRateFit


@pytest.mark.parametrize("rate", [300.0, 5000.0, 60_000.0])
def test_finds_the_rate_behind_noisy_observations(rate: float) -> None:
    fit, source = PrefillRateFit(prior_rate=8000.0), random.Random(1)
    for _ in range(60):
        num_tokens = source.randint(100, 8000)
        fit.observe(num_tokens, 0.03 + num_tokens / rate * source.uniform(0.9, 1.1))
    assert fit.tokens_per_second == pytest.approx(rate, rel=0.25)


def test_prompts_of_one_length_are_enough() -> None:
    fit = PrefillRateFit(prior_rate=8000.0)
    for _ in range(30):
        fit.observe(1000, 2.0)
    assert fit.tokens_per_second == pytest.approx(500, rel=0.1)


def test_short_prompts_show_the_overhead_not_a_slow_engine() -> None:
    fit = PrefillRateFit(prior_rate=8000.0)
    for _ in range(50):
        fit.observe(10, 0.03)
    assert fit.tokens_per_second > 4000


def test_follows_a_change() -> None:
    fit = PrefillRateFit(prior_rate=8000.0)
    for rate in (8000, 1000):
        for _ in range(60):
            fit.observe(4000, 4000 / rate)
    assert fit.tokens_per_second == pytest.approx(1000, rel=0.1)


def test_starts_at_the_prior() -> None:
    assert PrefillRateFit(prior_rate=123.0).tokens_per_second == 123.0


def test_stays_in_bounds_when_observations_make_no_sense() -> None:
    fit = PrefillRateFit(prior_rate=8000.0)
    for num_tokens in (10_000, 1, 10_000, 1):
        fit.observe(num_tokens, 1.0 / num_tokens)
    assert 1 <= fit.tokens_per_second <= 1e6
    assert fit.estimate_seconds(100) >= 0
