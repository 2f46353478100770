"""llm-d's token-aware rule: uncached tokens in flight over what a replica prefills in 1.5 s, and KV use over 0.8.

Two averages of a KEDA object, of which the larger count holds.
"""

from benchmarks.autoscaling.rivals.hpa import Pace, replicas_for_average
from benchmarks.autoscaling.view import FleetView

KV_USAGE = 0.8


class LlmdTokenAware:
    """Its rate is calibrated by hand: the engine model's own."""

    interval_seconds = 15.0

    def __init__(self, seconds: float, prefill_tokens_per_second: float, most: int) -> None:
        self._tokens = seconds * prefill_tokens_per_second
        self._pace = Pace(most)

    def wanted(self, view: FleetView) -> int:
        in_flight = view.held_tokens + sum(replica.uncached_tokens for replica in view.replicas)
        prefill = replicas_for_average(in_flight, self._tokens, view.wanted)
        decode = replicas_for_average(sum(replica.kv_usage for replica in view.replicas), KV_USAGE, view.wanted)
        return self._pace.follow(max(prefill, decode), view)
