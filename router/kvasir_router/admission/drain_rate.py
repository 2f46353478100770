"""How fast the queue drains: prompt tokens started per second of the time in which something waited. Reads no clock."""

import math

# Weighs the last half minute most: an engine that is gone or has come changes the rate within that time.
_MEMORY_SECONDS = 30.0


class DrainRate:
    """Sums that decay with time. The time in which nothing waits says nothing, and does not count."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None  # the last start, or when the queue filled; None: nothing waits

    def began(self, now: float) -> None:
        """Something waits from now on. May be repeated."""
        if self._since is None:
            self._since = now

    def ended(self, now: float) -> None:
        """Nothing waits any more."""
        self._count(0, now)
        self._since = None

    def started(self, num_tokens: int, now: float) -> None:
        """A request that waited has started."""
        self._count(num_tokens, now)

    def tokens_per_second(self, now: float) -> float | None:
        """None until requests have waited for a moment."""
        num_tokens, seconds = self._sums(now)
        return num_tokens / seconds if seconds > 0 else None

    def seconds_for(self, num_tokens: int, now: float) -> float | None:
        """None where nothing is known, or nothing drains."""
        rate = self.tokens_per_second(now)
        return num_tokens / rate if rate else None

    def _count(self, num_tokens: int, now: float) -> None:
        self._num_tokens, self._seconds = self._sums(now)
        self._num_tokens += num_tokens
        self._since = now

    def _sums(self, now: float) -> tuple[float, float]:
        elapsed = 0.0 if self._since is None else now - self._since
        decay = math.exp(-elapsed / _MEMORY_SECONDS)
        return self._num_tokens * decay, self._seconds * decay + elapsed
