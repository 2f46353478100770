"""The HorizontalPodAutoscaler's pace: tolerance of a tenth, up at once by 100 % or 4 pods in 15 s, down after 300 s."""

import math

from benchmarks.autoscaling.rule import within
from benchmarks.autoscaling.view import FleetView


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


class HpaOnKvUsage:
    """Replicas that serve times the mean usage over the target; those that start count as unused while it grows."""

    interval_seconds = 15.0

    def __init__(self, target: float, most: int) -> None:
        self._target = target
        self._pace = Pace(most)

    def wanted(self, view: FleetView) -> int:
        serving = len(view.replicas)
        if not serving:
            return view.wanted
        ratio = sum(replica.kv_usage for replica in view.replicas) / serving / self._target
        if abs(ratio - 1) <= 0.1:
            return self._pace.follow(view.wanted, view)
        wanted = math.ceil(ratio * serving)
        if ratio > 1:  # and with the unready at zero the ratio may turn: then nothing happens
            ratio_of_all = ratio * serving / view.wanted
            wanted = math.ceil(ratio_of_all * view.wanted) if ratio_of_all > 1.1 else view.wanted
        return self._pace.follow(wanted, view)


class KedaOnQueueLength:
    """An HPA on the average of waiting requests: so many replicas that each has at most `per_replica` of them."""

    interval_seconds = 15.0

    def __init__(self, per_replica: float, most: int) -> None:
        self._per_replica = per_replica
        self._pace = Pace(most)

    def wanted(self, view: FleetView) -> int:
        waiting = view.num_held + sum(replica.num_waiting for replica in view.replicas)
        return self._pace.follow(math.ceil(waiting / self._per_replica), view)
