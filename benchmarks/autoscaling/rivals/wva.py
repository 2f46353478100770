"""The Workload Variant Autoscaler's saturation rule (V1): one more when spare is short, one less when all would hold.

Its sample waits 240 s both ways; here only down, which is kinder to it.
"""

from statistics import fmean

from benchmarks.autoscaling.rivals.hpa import Pace
from benchmarks.autoscaling.view import FleetView

_QUEUE = 5
_SPARE_QUEUE = 3
_SPARE_KV = 0.1


class WvaSaturation:
    interval_seconds = 30.0

    def __init__(self, kv_threshold: float, most: int) -> None:
        self._kv = kv_threshold
        self._pace = Pace(most, down_seconds=240.0)

    def wanted(self, view: FleetView) -> int:
        return self._pace.follow(self._recommended(view), view)

    def _recommended(self, view: FleetView) -> int:
        replicas, num = view.replicas, len(view.replicas)
        if num < view.wanted or not num:
            return view.wanted  # some are pending
        unsaturated = [each for each in replicas if each.kv_usage < self._kv and each.num_waiting_peak < _QUEUE]
        if not unsaturated:
            return view.wanted + 1
        spare_kv = self._kv - fmean(each.kv_usage for each in unsaturated)
        spare_queue = _QUEUE - fmean(each.num_waiting_peak for each in unsaturated)
        if spare_kv < _SPARE_KV or spare_queue < _SPARE_QUEUE:
            return view.wanted + 1
        if num < 2:
            return view.wanted
        usage = sum(each.kv_usage for each in replicas) / (num - 1)
        queue = sum(each.num_waiting_peak for each in replicas) / (num - 1)
        holds = self._kv - usage >= _SPARE_KV and _QUEUE - queue >= _SPARE_QUEUE
        return view.wanted - 1 if holds else view.wanted
