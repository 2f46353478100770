"""How many requests may be repeated elsewhere: a share of those that come, so that engines which all fail are not asked
several times as often as engines which answer. Reads no clock.
"""

import math

_SHARE = 0.2
# One engine that dies takes with it what it was doing: so many a second may always be repeated.
_MIN_RETRIES_PER_SECOND = 10.0
_WINDOW_SECONDS = 10.0


class RetryBudget:
    """Counts of about the last ten seconds: they fade."""

    def __init__(self) -> None:
        self._num_requests = 0.0
        self._num_retries = 0.0
        self._counted_at = 0.0

    def count_request(self, now: float) -> None:
        self._fade(now)
        self._num_requests += 1

    def has_left(self, now: float) -> bool:
        """Whether another attempt may be made."""
        self._fade(now)
        return self._num_retries + 1 <= _MIN_RETRIES_PER_SECOND * _WINDOW_SECONDS + _SHARE * self._num_requests

    def take(self, now: float) -> bool:
        """The same, and the attempt is counted."""
        if not self.has_left(now):
            return False
        self._num_retries += 1
        return True

    def _fade(self, now: float) -> None:
        weight = math.exp(-(now - self._counted_at) / _WINDOW_SECONDS)
        self._num_requests *= weight
        self._num_retries *= weight
        self._counted_at = now
