"""What a rule sees of the fleet at one moment, as Prometheus would show it: gauges averaged over the last minute."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Of one that takes requests. `_now` is the latest scrape, `_peak` the most of a minute, all else its mean."""

    name: str
    serves_seconds: float
    kv_used_tokens: float
    kv_used_tokens_now: float
    kv_used_tokens_peak: float
    kv_capacity_tokens: float
    num_running: float
    num_waiting: float
    num_waiting_peak: float
    uncached_tokens: float
    uncached_tokens_now: float
    prefill_tokens_per_second: float | None
    step_seconds: float

    @property
    def kv_usage(self) -> float:
        return self.kv_used_tokens / self.kv_capacity_tokens

    @property
    def kv_usage_peak(self) -> float:
        return self.kv_used_tokens_peak / self.kv_capacity_tokens


@dataclass(frozen=True, slots=True)
class FleetView:
    """`wanted`: replicas, those on their way included. Rates over a minute, latencies the p90 of the same."""

    now: float
    wanted: int
    replicas: tuple[ReplicaView, ...]
    num_held: int
    held_tokens: int
    finished_per_second: float
    uncached_tokens_per_second: float
    mean_uncached_tokens: float
    mean_output_tokens: float
    ttft_p90: float | None
    itl_p90: float | None

    @property
    def is_busy(self) -> bool:
        return self.num_held > 0 or any(each.num_running or each.num_waiting for each in self.replicas)
