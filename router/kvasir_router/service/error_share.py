"""The share of an endpoint's recent answers that were errors; old ones fade. Reads no clock."""

import math

_MEMORY_SECONDS = 20.0


class ErrorShare:
    def __init__(self) -> None:
        self._num_answers = 0.0
        self._num_errors = 0.0
        self._counted_at = 0.0

    def count(self, *, is_error: bool, now: float) -> None:
        self._fade(now)
        self._num_answers += 1
        self._num_errors += is_error

    def num_answers(self, now: float) -> float:
        self._fade(now)
        return self._num_answers

    def num_errors(self, now: float) -> float:
        self._fade(now)
        return self._num_errors

    def _fade(self, now: float) -> None:
        weight = math.exp(-(now - self._counted_at) / _MEMORY_SECONDS)
        self._num_answers *= weight
        self._num_errors *= weight
        self._counted_at = now
