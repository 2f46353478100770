"""Whether prompts wait for one another at an engine: whether its time to first token grows with the prefill ahead.

An engine may take long and let nobody wait: a fixed time before each first token is no queue. A rate fitted to such
times explains them as work all the same, and whoever holds requests back for it makes the engine look slower still.
Reads no clock.
"""

from math import exp2

_HALF_LIFE_SECONDS = 30.0
# Of the work ahead, its standard deviation in means: from less no growth can be told.
_LEAST_SPREAD = 0.25
# Of the growth that the fitted rate expects.
_LEAST_GROWTH = 0.5


class QueueingEvidence:
    """`is_queueing` is what was shown last: observations that are all alike neither show nor refute it."""

    __slots__ = ("_n", "_sum_x", "_sum_xx", "_sum_xy", "_sum_y", "_updated_at", "is_queueing")

    def __init__(self) -> None:
        self._n = self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0.0
        self._updated_at = 0.0
        self.is_queueing = False

    def observe(self, work: float, seconds: float, expected_seconds_per_work: float, now: float) -> None:
        decay = exp2(min(self._updated_at - now, 0.0) / _HALF_LIFE_SECONDS)
        self._updated_at = now
        self._n = self._n * decay + 1
        self._sum_x = self._sum_x * decay + work
        self._sum_y = self._sum_y * decay + seconds
        self._sum_xx = self._sum_xx * decay + work * work
        self._sum_xy = self._sum_xy * decay + work * seconds
        mean = self._sum_x / self._n
        variance = self._sum_xx / self._n - mean * mean
        if variance >= (_LEAST_SPREAD * mean) ** 2 and variance > 0:
            growth = (self._sum_xy / self._n - mean * self._sum_y / self._n) / variance
            self.is_queueing = growth >= _LEAST_GROWTH * expected_seconds_per_work
