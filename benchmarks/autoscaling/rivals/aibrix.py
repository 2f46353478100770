"""AIBrix KPA on KV usage: a stable window of 180 s and a panic window of 60 s, down after 300 s."""

import math
from statistics import fmean

from benchmarks.autoscaling.rivals.hpa import Pace
from benchmarks.autoscaling.view import FleetView


class AibrixKpa:
    interval_seconds = 15.0

    def __init__(self, target: float, most: int) -> None:
        self._target = target
        self._seen: list[tuple[float, float]] = []
        self._pace = Pace(most)
        self._panic_until = 0.0
        self._panic_replicas = 0

    def wanted(self, view: FleetView) -> int:
        """In panic it never goes below what it wanted since it began; each step at most doubles or halves."""
        now = view.now
        self._seen = [each for each in self._seen if each[0] > now - 180]
        self._seen.append((now, sum(replica.kv_usage for replica in view.replicas)))
        stable = self._desired(fmean(usage for _, usage in self._seen), view.wanted)
        panic = self._desired(fmean(usage for at, usage in self._seen if at > now - 60), view.wanted)
        if panic / max(1, len(view.replicas)) > 2:
            self._panic_until = now + 180
        if now < self._panic_until:
            self._panic_replicas = max(self._panic_replicas, panic, view.wanted)
            return self._pace.follow(self._panic_replicas, view)
        self._panic_replicas = 0
        return self._pace.follow(stable, view)

    def _desired(self, usage: float, current: int) -> int:
        wanted = math.ceil(usage / self._target)
        if abs(usage / self._target / current - 1) <= 0.1:
            return current
        return min(max(wanted, current // 2), 2 * current)
