"""Dynamo's load planner: one more when all engines are over the SLA, one less when all are well below it.

Its regressions are given the model's truth: an engine's time to the first token is its queue and one more prompt.
"""

from benchmarks.autoscaling.rule import within
from benchmarks.autoscaling.view import FleetView, ReplicaView


class DynamoLoadPlanner:
    interval_seconds = 5.0

    def __init__(self, share: float, ttft_seconds: float, itl_seconds: float, rate: float, most: int) -> None:
        """`share` of the SLO is its SLA."""
        self._ttft, self._itl, self._rate, self._most = share * ttft_seconds, share * itl_seconds, rate, most

    def wanted(self, view: FleetView) -> int:
        if len(view.replicas) < view.wanted:
            return view.wanted  # some are pending
        ratios = [self._ratio(replica, view.mean_uncached_tokens) for replica in view.replicas]
        if min(ratios) > 1:
            return within(view.wanted + 1, self._most)
        return within(view.wanted - (max(ratios) < 0.8), self._most)

    def _ratio(self, replica: ReplicaView, mean_tokens: float) -> float:
        ttft = (replica.uncached_tokens_now + mean_tokens) / self._rate
        return max(ttft / self._ttft, replica.step_seconds / self._itl)
