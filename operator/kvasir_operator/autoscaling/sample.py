"""What was measured of one role at one moment, and which of it may be believed."""

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ReplicaLoad:
    """One replica's own series; `name` is that of its pod. Tokens are of the KV cache where they say kv."""

    name: str
    kv_used_tokens: float
    """Averaged over a minute."""
    kv_capacity_tokens: float
    kv_used_tokens_now: float
    num_running: float
    num_waiting: float
    uncached_tokens: float
    """Prompt tokens still to be computed, of what waits and of what runs."""
    prefill_tokens_per_second: float | None
    """Measured while it prefilled; None before it has prefilled anything."""

    @property
    def num_in_flight(self) -> float:
        return self.num_running + self.num_waiting

    @property
    def kv_usage(self) -> float:
        return self.kv_used_tokens / self.kv_capacity_tokens


@dataclass(frozen=True)
class RoleSample:
    """Rates and latencies are over the last minutes, of all replicas together.

    Latencies in seconds; None where no request gave one.
    """

    at: float
    """Unix time of the oldest scrape that is in it, by the clock of whoever scraped."""
    replicas: tuple[ReplicaLoad, ...]
    num_held: float = 0.0
    """Requests that wait in routers."""
    held_tokens: float = 0.0
    """Their prompt tokens."""
    requests_per_second: float = 0.0
    """That were answered."""
    uncached_tokens_per_second: float = 0.0
    """Prompt tokens arriving that no cache held."""
    computed_tokens_per_second: float = 0.0
    """Of these, begun: less than arrive while a queue grows."""
    mean_uncached_tokens: float = 0.0
    """Of one prompt."""
    mean_output_tokens: float = 0.0
    """Of one request."""
    time_to_first_token_p90: float | None = None
    inter_token_latency_p90: float | None = None
    window_seconds: float = 60.0
    """Of the longest of the windows that rates and latencies are over."""
    routers: frozenset[str] = frozenset()
    """Pods that said what they hold."""
    asked_at: float | None = None
    """When it was asked for, by the same clock; None: just now, by the operator's own."""
    lacking: tuple[str, ...] = ()
    """What should have come with the rest of a pod's series, or of the role's, and did not: 0 only stands for it."""

    @property
    def num_in_flight(self) -> float:
        return self.num_held + sum(replica.num_in_flight for replica in self.replicas)

    @property
    def busiest_kv_usage(self) -> float:
        """Now, or as it was over a minute; of at least one replica."""
        used = (max(each.kv_used_tokens, each.kv_used_tokens_now) / each.kv_capacity_tokens for each in self.replicas)
        return max(used)

    @property
    def most_running(self) -> float:
        """At one of at least one replica."""
        return max(each.num_running for each in self.replicas)

    def only(self, names: Collection[str]) -> "RoleSample":
        """Without replicas of other names: Prometheus shows a removed pod's series for minutes."""
        return replace(self, replicas=tuple(replica for replica in self.replicas if replica.name in names))
