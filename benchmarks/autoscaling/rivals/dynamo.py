"""Dynamo's load planner: one more when all engines are over the SLA, one less when all would be well below it.

As its `load_scaling.py` for aggregated engines: time to the first token and between tokens decide apart, either may
add and both must agree to take away. Taking away looks at N/(N-1) of each engine's load: of the time to the first
token only the queue's part counts against 0.8 of what the SLA leaves beside a prompt's own. Its regressions are given
the model's truth, and it waits while a replica is pending.
"""

from collections.abc import Iterable

from benchmarks.autoscaling.rule import within
from benchmarks.autoscaling.view import FleetView, ReplicaView
from benchmarks.routing.engine import EngineModel

SENSITIVITY = 0.8


class DynamoLoadPlanner:
    interval_seconds = 5.0

    def __init__(self, ttft_seconds: float, itl_seconds: float, model: EngineModel, most: int) -> None:
        """Its SLA; infinite for what a role does not answer for."""
        self._ttft, self._itl, self._model, self._most = ttft_seconds, itl_seconds, model, most

    def wanted(self, view: FleetView) -> int:
        num = len(view.replicas)
        if num < view.wanted or not num:
            return view.wanted  # some are pending
        own = view.mean_uncached_tokens / self._model.prefill_tokens_per_second
        queues = [self._queue_seconds(replica) for replica in view.replicas]
        if _all_over(self._ttft, (queue + own for queue in queues)) or _all_over(
            self._itl, (replica.step_seconds for replica in view.replicas)
        ):
            return within(view.wanted + 1, self._most)
        if num == 1:
            return view.wanted
        kept = num / (num - 1)
        queue_budget = (self._ttft - own) * SENSITIVITY
        holds = all(queue * kept < queue_budget for queue in queues)
        holds = holds and all(self._holds_decodes(replica, kept) for replica in view.replicas)
        return within(view.wanted - holds, self._most)

    def _queue_seconds(self, replica: ReplicaView) -> float:
        return replica.uncached_tokens_now / self._model.prefill_tokens_per_second

    def _holds_decodes(self, replica: ReplicaView, kept: float) -> bool:
        kv_tokens = (replica.kv_used_tokens_now + replica.uncached_tokens_now) * kept
        reading = self._model.decode_seconds_per_kv_token * replica.kv_used_tokens_now * (kept - 1)
        return kv_tokens < replica.kv_capacity_tokens and replica.step_seconds + reading < self._itl * SENSITIVITY


def _all_over(limit_seconds: float, estimates: Iterable[float]) -> bool:
    return all(each > limit_seconds for each in estimates)
