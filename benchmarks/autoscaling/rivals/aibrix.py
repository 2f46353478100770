"""AIBrix KPA on KV usage: a stable window of 180 s and a panic window of 60 s, down after 300 s.

As its `algorithm/kpa.go`: what a window's mean comes to, at most doubled and at least halved in a step. Panic begins
where the short window wants twice as many as are ready or more, by its own count, and ends a stable window after that.
"""

import math
from statistics import fmean

from benchmarks.autoscaling.rivals.hpa import TOLERANCE, Pace
from benchmarks.autoscaling.view import FleetView

STABLE_SECONDS = 180.0
PANIC_SECONDS = 60.0
PANIC_THRESHOLD = 2.0


class AibrixKpa:
    interval_seconds = 15.0

    def __init__(self, target: float, most: int) -> None:
        self._target = target
        self._seen: list[tuple[float, float]] = []
        self._pace = Pace(most)
        self._panic_until = 0.0
        self._panic_replicas = 0

    def wanted(self, view: FleetView) -> int:
        """In panic it never goes below what it wanted since it began."""
        now = view.now
        self._seen = [each for each in self._seen if each[0] > now - STABLE_SECONDS]
        self._seen.append((now, sum(replica.kv_usage for replica in view.replicas)))
        stable = fmean(usage for _, usage in self._seen) / self._target
        panic = fmean(usage for at, usage in self._seen if at > now - PANIC_SECONDS) / self._target
        if math.ceil(panic) / max(1, len(view.replicas)) >= PANIC_THRESHOLD:
            self._panic_until = now + STABLE_SECONDS
        desired = _desired(stable, view.wanted)
        if now < self._panic_until:
            self._panic_replicas = max(self._panic_replicas, desired, _desired(panic, view.wanted), view.wanted)
            return self._pace.follow(self._panic_replicas, view)
        self._panic_replicas = 0
        return self._pace.follow(desired, view)


def _desired(replicas: float, current: int) -> int:
    if abs(replicas / current - 1) <= TOLERANCE:
        return current
    return min(max(math.ceil(replicas), current // 2), 2 * current)
