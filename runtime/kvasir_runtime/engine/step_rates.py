"""How fast the engine works, over the last seconds in which it did: what an idle hour does not dilute."""

from kvasir_runtime.scheduling.step import TimedStep
from kvasir_runtime.scheduling.step_budget import DecayingRate

HALF_LIFE_SECONDS = 5.0
"""Of work: after so much of it an observation counts half."""
MIN_PREFILL_TOKENS = 128
"""In a step, before it says how fast prompts are computed: fewer tell what a step costs whatever is in it."""


class StepRates:
    """Both figures count what steps took on the clock, planning and other sequences' decodes included."""

    def __init__(self) -> None:
        self._steps = DecayingRate(HALF_LIFE_SECONDS)
        self._prefill = DecayingRate(HALF_LIFE_SECONDS)

    @property
    def steps_per_second(self) -> float:
        return self._steps.value or 0.0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """None before a step computed many tokens of prompts."""
        return self._prefill.value

    def observe_step(self, step: TimedStep) -> None:
        self._steps.observe(1, step.clock_seconds)
        if step.num_prompt_tokens >= MIN_PREFILL_TOKENS:
            self._prefill.observe(step.num_prompt_tokens, step.clock_seconds)
