"""How long requests of a service without ready engines wait for one: from the first that comes to the first that is
sent.

Where all that waited have left before, nothing is counted. Reads no clock.
"""

from bisect import bisect_left
from itertools import accumulate

BUCKETS_SECONDS = (1, 2.5, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600)

_GIVEN_UP_AFTER_WAITS = 3


class Wakes:
    def __init__(self) -> None:
        self._begun_at: float | None = None
        self._asked_at = 0.0
        self._counts = [0] * (len(BUCKETS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def asked_for(self, now: float, max_wait_seconds: float) -> None:
        """A request comes and there is no engine: none waits for longer. Retries follow, or the wake was given up."""
        if self._begun_at is None or now - self._asked_at > _GIVEN_UP_AFTER_WAITS * max_wait_seconds:
            self._begun_at = now
        self._asked_at = now

    def sent(self, now: float, *, has_waited: bool) -> None:
        """A request goes to an engine. `has_waited`: it was held before."""
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is not None and has_waited:
            self._counts[bisect_left(BUCKETS_SECONDS, now - begun_at)] += 1
            self.sum_seconds += now - begun_at

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and how many took at most so long, as Prometheus has them."""
        bounds = [*(f"{float(bound)}" for bound in BUCKETS_SECONDS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
