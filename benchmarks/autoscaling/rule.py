"""The seam of rules: one object a run, asked at its own interval for how many replicas it wants."""

from typing import Protocol

from benchmarks.autoscaling.view import FleetView


class Rule(Protocol):
    interval_seconds: float

    def wanted(self, view: FleetView) -> int: ...


def within(replicas: float, most: int) -> int:
    return min(max(int(replicas), 1), most)
