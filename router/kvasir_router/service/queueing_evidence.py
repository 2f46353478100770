"""Whether prompts wait for one another at an engine: whether its time to first token grows with the prefill ahead.

An engine may take long and let nobody wait: a fixed time before each first token is no queue. A rate fitted to such
times explains them as work all the same, and whoever holds requests back for it makes the engine look slower still.

Only prompts that were there together tell, each compared with the one that ended before it: how much more was ahead of
it, and how much longer it took. An engine that is slower than it was, and has more to do, need not be slower because of
that. Reads no clock.
"""

from math import exp2, inf, sqrt

_HALF_LIFE_SECONDS = 30.0
# Of the growth that the fitted rate expects: from here on, a queue explains more than a fixed time does.
_LEAST_GROWTH = 0.5
# How far from that a growth must be, in standard errors, to show or to refute a queue.
_CERTAINTY = 3.0
# What two times differ by without a reason, before anything is seen: as if of so many comparisons.
_PRIOR_NOISE_SECONDS = 0.005
_PRIOR_WEIGHT = 10.0


class QueueingEvidence:
    """`is_queueing` is what was shown last: works that are all alike neither show nor refute it."""

    __slots__ = ("_ended_at", "_n", "_seconds", "_sum_xx", "_sum_xy", "_sum_yy", "_work", "is_queueing")

    def __init__(self) -> None:
        self._n = self._sum_xx = self._sum_xy = self._sum_yy = 0.0
        self._work = self._seconds = 0.0  # of the last one
        self._ended_at = -inf
        self.is_queueing = False

    def observe(self, work: float, seconds: float, expected_seconds_per_work: float, now: float) -> None:
        since_last = now - self._ended_at
        self._decay(exp2(-max(since_last, 0.0) / _HALF_LIFE_SECONDS))
        if seconds > since_last:  # they were there together
            self._compare(work - self._work, seconds - self._seconds)
            self._judge(_LEAST_GROWTH * expected_seconds_per_work)
        self._work, self._seconds, self._ended_at = work, seconds, now

    def _decay(self, factor: float) -> None:
        self._n *= factor
        self._sum_xx *= factor
        self._sum_xy *= factor
        self._sum_yy *= factor

    def _compare(self, more_work: float, longer_seconds: float) -> None:
        self._n += 1
        self._sum_xx += more_work * more_work
        self._sum_xy += more_work * longer_seconds
        self._sum_yy += longer_seconds * longer_seconds

    def _judge(self, least_growth: float) -> None:
        if not self._sum_xx:
            return
        growth = self._sum_xy / self._sum_xx
        unexplained = max(self._sum_yy - growth * self._sum_xy, 0.0)
        noise = (unexplained + _PRIOR_WEIGHT * _PRIOR_NOISE_SECONDS**2) / (self._n + _PRIOR_WEIGHT)
        if abs(growth - least_growth) > _CERTAINTY * sqrt(noise / self._sum_xx):
            self.is_queueing = growth > least_growth
