"""How fast an engine says that it works."""

import pytest

from kvasir_runtime.engine.core import HALF_LIFE_SECONDS, MIN_PREFILL_TOKENS, StepRates
from kvasir_runtime.scheduling.step import TimedStep


def step(seconds: float, num_prompt_tokens: int = 0) -> TimedStep:
    return TimedStep(
        num_decodes=1, num_prompt_tokens=num_prompt_tokens, num_asked=0, num_accepted=0, num_proposals=0,
        seconds=99.0, clock_seconds=seconds,
    )  # fmt: skip


def test_an_engine_that_made_no_step_says_nothing():
    rates = StepRates()
    assert (rates.steps.value, rates.prefill.value) == (None, None)


def test_steps_are_counted_by_the_clock():
    rates = StepRates()
    for _ in range(10):
        rates.observe_step(step(0.05))
    assert rates.steps.value == pytest.approx(20)


def test_prompts_are_measured_over_the_steps_that_computed_many_of_their_tokens():
    rates = StepRates()
    rates.observe_step(step(0.5, MIN_PREFILL_TOKENS - 1))
    assert rates.prefill.value is None
    rates.observe_step(step(0.5, MIN_PREFILL_TOKENS))
    assert rates.prefill.value == pytest.approx(2 * MIN_PREFILL_TOKENS)


def test_after_a_half_life_of_work_what_was_counts_half():
    rates = StepRates()
    rates.observe_step(step(HALF_LIFE_SECONDS, 1000))
    rates.observe_step(step(HALF_LIFE_SECONDS, 4000))
    assert rates.prefill.value == pytest.approx((500 + 4000) / (1.5 * HALF_LIFE_SECONDS))
