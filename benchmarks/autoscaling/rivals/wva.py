"""The Workload Variant Autoscaler's saturation rule (V1): one more when spare is short, one less when all would hold.

As its saturation analyzer: peaks of a minute; saturated replicas count for neither. Its sample waits 240 s both ways;
here only down, which is kinder to it.
"""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.autoscaling.rivals.hpa import Pace
from benchmarks.autoscaling.view import FleetView, ReplicaView

QUEUE = 5
SPARE_QUEUE = 3
SPARE_KV = 0.1
LEAST_TO_SHRINK = 2
"""Replicas that are not saturated."""


class WvaSaturation:
    interval_seconds = 30.0

    def __init__(self, kv_threshold: float, most: int) -> None:
        self._kv = kv_threshold
        self._pace = Pace(most, down_seconds=240.0)

    def wanted(self, view: FleetView) -> int:
        return self._pace.follow(self._recommended(view), view)

    def _recommended(self, view: FleetView) -> int:
        if len(view.replicas) < view.wanted or not view.replicas:
            return view.wanted  # some are pending
        unsaturated = [
            each for each in view.replicas if each.kv_usage_peak < self._kv and each.num_waiting_peak < QUEUE
        ]
        if not self._has_spare(unsaturated, len(unsaturated)):
            return view.wanted + 1
        if len(unsaturated) < LEAST_TO_SHRINK:
            return view.wanted
        return view.wanted - self._has_spare(unsaturated, len(unsaturated) - 1)

    def _has_spare(self, replicas: Sequence[ReplicaView], num: int) -> bool:
        """Where `num` of them had the load of all."""
        if not replicas:
            return False
        growth = len(replicas) / num
        spare_kv = self._kv - growth * fmean(each.kv_usage_peak for each in replicas)
        spare_queue = QUEUE - growth * fmean(each.num_waiting_peak for each in replicas)
        return spare_kv >= SPARE_KV - 1e-9 and spare_queue >= SPARE_QUEUE - 1e-9
