"""The HorizontalPodAutoscaler: its counts for metrics of pods and for averages of a total, and its pace.

Tolerance of a tenth, up at once by 100 % or 4 pods in 15 s, down after 300 s. KEDA makes HPAs of the second kind.
"""

import math

from benchmarks.autoscaling.rule import within
from benchmarks.autoscaling.view import FleetView

TOLERANCE = 0.1


class Pace:
    def __init__(self, most: int, down_seconds: float = 300.0) -> None:
        self._most = most
        self._down_seconds = down_seconds
        self._recommended: list[tuple[float, int]] = []
        self._added: list[tuple[float, int]] = []

    def follow(self, wanted: int, view: FleetView) -> int:
        now, current = view.now, view.wanted
        self._recommended = [each for each in self._recommended if each[0] > now - self._down_seconds]
        self._recommended.append((now, wanted))
        if wanted <= current:
            return within(min(current, max(each for _, each in self._recommended)), self._most)
        self._added = [each for each in self._added if each[0] > now - 15]
        begin = current - sum(added for _, added in self._added)
        grown = within(min(wanted, max(2 * begin, begin + 4)), self._most)
        self._added.append((now, grown - current))
        return grown


def replicas_for_pods(usages: list[float], target: float, current: int) -> int:
    """`usages`: of the pods that have the metric. The others of `current` count as unused where it grows, as on target
    where it shrinks; where that turns the ratio round, nothing happens."""
    if not usages:
        return current
    ratio = sum(usages) / len(usages) / target
    missing = (current - len(usages)) * (target if ratio < 1 else 0.0)
    ratio_of_all = (sum(usages) + missing) / current / target
    turns = (ratio < 1 < ratio_of_all) or (ratio > 1 > ratio_of_all)
    return current if turns or _is_tolerable(ratio_of_all) else _whole(ratio_of_all * current)


def replicas_for_average(total: float, target: float, current: int) -> int:
    """So many that each has at most `target` of the total."""
    return current if _is_tolerable(total / (target * current)) else _whole(total / target)


def _is_tolerable(ratio: float) -> bool:
    return abs(ratio - 1) <= TOLERANCE + 1e-9


def _whole(replicas: float) -> int:
    return math.ceil(replicas - 1e-9)


class HpaOnKvUsage:
    interval_seconds = 15.0

    def __init__(self, target: float, most: int) -> None:
        self._target = target
        self._pace = Pace(most)

    def wanted(self, view: FleetView) -> int:
        usages = [replica.kv_usage for replica in view.replicas]
        return self._pace.follow(replicas_for_pods(usages, self._target, view.wanted), view)


class KedaOnQueueLength:
    """On the average of waiting requests: so many replicas that each has at most `per_replica` of them."""

    interval_seconds = 15.0

    def __init__(self, per_replica: float, most: int) -> None:
        self._per_replica = per_replica
        self._pace = Pace(most)

    def wanted(self, view: FleetView) -> int:
        waiting = view.num_held + sum(replica.num_waiting for replica in view.replicas)
        return self._pace.follow(replicas_for_average(waiting, self._per_replica, view.wanted), view)
