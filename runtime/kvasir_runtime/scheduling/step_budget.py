"""How many tokens of prompts a step may compute, such that nobody who decodes in it waits for long.

While nobody decodes that is the whole token budget. Else a step aims at a time, by what steps of decodes alone and
tokens of prompts took of late.
"""

from collections import defaultdict

from kvasir_runtime.scheduling.step import TimedStep

HALF_LIFE_SECONDS = 1.0
"""Of work: chunks follow soon when the machine gets busy, or prompts long."""
UNMEASURED_TOKENS = 256
"""Of the first chunk beside decodes, where no prompt was measured before."""
LEAST_SHARE = 2.0
"""Of a step's time that prompts get, as a multiple of what its decodes take alone: where those take long by themselves,
streams are slowed down threefold rather than prompts kept waiting many times as long."""
FINISHING_SHARE = 2.0
"""How many times as long a step may take that leaves no prompt waiting, where more wait for that than for the step. The
rest in a step of its own would have the weights read once more."""


class DecayingRate:
    """So much a second, recent seconds counting more."""

    def __init__(self, half_life_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def value(self) -> float | None:
        """None before anything was observed."""
        return self._amount / self._seconds if self._seconds else None

    def observe(self, amount: float, seconds: float) -> None:
        weight = 0.5 ** (seconds / self._half_life_seconds)
        self._amount = self._amount * weight + amount
        self._seconds = self._seconds * weight + seconds


class StepBudget:
    def __init__(self, max_num_batched_tokens: int, max_step_seconds: float, block_size: int) -> None:
        self._most = max_num_batched_tokens
        self._max_step_seconds = max_step_seconds
        self._block_size = block_size
        self._decodes: defaultdict[int, DecayingRate] = defaultdict(lambda: DecayingRate(HALF_LIFE_SECONDS))
        """Steps a second, of decodes alone; by how often their number doubles."""
        self._prompts = DecayingRate(HALF_LIFE_SECONDS)
        """Tokens a second, beyond what the decodes of the same steps would have taken alone."""

    def num_prompt_tokens(self, num_decodes: int, num_prompts: int, num_left: int) -> int:
        """Tokens of prompts that a step may compute beside so many decodes, where so many prompts wait and have
        `num_left` tokens left to compute: all of those, or whole blocks, one at least."""
        if not num_decodes:
            return self._most
        rate, decode_seconds = self._prompts.value, self._decode_seconds(num_decodes)
        seconds = max(self._max_step_seconds - decode_seconds, LEAST_SHARE * decode_seconds)
        num_tokens = UNMEASURED_TOKENS if rate is None else int(seconds * rate)
        if num_prompts > num_decodes and num_tokens < num_left <= FINISHING_SHARE * num_tokens:
            return min(self._most, num_left)
        return min(self._most, max(1, num_tokens // self._block_size) * self._block_size)

    def observe_step(self, step: TimedStep) -> None:
        if step.is_warming_up or step.clock_seconds <= 0:
            return
        if not step.num_prompt_tokens:
            self._decodes[step.num_decodes.bit_length()].observe(1, step.clock_seconds)
            return
        least = step.clock_seconds / 2  # what decodes took before may say too much
        seconds = max(least, step.clock_seconds - self._decode_seconds(step.num_decodes))
        self._prompts.observe(step.num_prompt_tokens, seconds)

    def _decode_seconds(self, num_decodes: int) -> float:
        """0 where nothing like it was measured."""
        rate = self._decodes[num_decodes.bit_length()].value if num_decodes else None
        return 1 / rate if rate else 0.0
