"""Every PromQL expression that the autoscaler asks, and nothing else; metric names are the engine's and the router's.

Labels `inference_service` and `role` are those that PodMonitors give; a gateway names the service in its own. A pod
that is scraped twice, by two jobs or by a pair of servers, counts once: of series that differ in others' labels, the
highest.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvasir_operator.desired.roles import EngineRoleName
from kvasir_operator.kube.kinds import ServiceKey

WINDOW, LONG_WINDOW = "1m", "2m"
"""Of rates and latencies: short, so that a burst is seen while it lasts; long where scrapes are far apart."""
WINDOW_SECONDS, LONG_WINDOW_SECONDS = 60.0, 120.0
_DAYS = (1, 2, 3, 7)
_LOOKUPS = ("kvasir_prefix_cache_queries_total", "kvasir_prefix_cache_hits_total")


@dataclass(frozen=True)
class RoleQueries:
    """Of one role. `by pod`: a value for each, by label `pod`; the others are one value, or none."""

    service: ServiceKey
    role: EngineRoleName

    def by_pod(self) -> dict[str, str]:
        own = self._selector
        waiting = f"max by (pod) (kvasir_num_requests_waiting{own}) + max by (pod) (kvasir_num_requests_held{own})"
        return {
            "kv_used_tokens": f"max by (pod) (avg_over_time(kvasir_kv_cache_used_tokens{own}[{WINDOW}]))",
            "kv_used_tokens_now": f"max by (pod) (kvasir_kv_cache_used_tokens{own})",
            "kv_capacity_tokens": f"max by (pod) (kvasir_kv_cache_capacity_tokens{own})",
            "num_running": f"max by (pod) (kvasir_num_requests_running{own})",
            "num_waiting": waiting,
            "uncached_tokens": f"max by (pod) (kvasir_uncached_tokens{own})",
            "computed_tokens": " - ".join(f"max by (pod) ({counter}{own})" for counter in _LOOKUPS),
            "uncached_tokens_growth": _growth(f"max by (pod) (kvasir_uncached_tokens{own})"),
            "prefill_tokens_per_second": f"max by (pod) (kvasir_prefill_tokens_per_second{own})",
            "scraped_at": f"max by (pod) (timestamp(kvasir_kv_cache_capacity_tokens{own}))",
        }

    def of_role(self, pods: Collection[str]) -> dict[str, str]:
        """Prompts count as computed, and looked up in the cache, once they begin; what waits is a gauge's growth.

        Latencies are those of `pods` alone: a pod that was slow and is gone calls for nothing. Rates are not: what
        arrived at it arrives still. A value over the long window has the label `window`.
        """
        rates = {
            "requests_per_second": "kvasir_requests_finished_total",
            "first_tokens_per_second": "kvasir_time_to_first_token_seconds_count",
            "output_tokens_per_second": "kvasir_generation_tokens_total",
        }
        latencies = {
            "time_to_first_token_p90": "kvasir_time_to_first_token_seconds",
            "inter_token_latency_p90": "kvasir_inter_token_latency_seconds",
        }
        return {
            **{name: _over_windows(self._rate(metric)) for name, metric in rates.items()},
            "computed_tokens_per_second": _over_windows(self._computed),
            **{name: _over_windows(self._p90(metric, pods)) for name, metric in latencies.items()},
        }

    def held(self, is_behind_gateway: bool) -> dict[str, str]:
        """By router pod: what waits there for an engine, how it grows, and when that was read."""
        where = {"service": str(self.service)} if is_behind_gateway else self._labels | {"role": "router"}
        own = _selector(where)
        return {
            "num_held": _of_tenants(f"kvasir_router_queued_requests{own}"),
            "held_tokens": _of_tenants(f"kvasir_router_queued_tokens{own}"),
            "held_tokens_growth": _growth(_of_tenants(f"kvasir_router_queued_tokens{own}")),
            "scraped_at": f"max by (pod) (timestamp(kvasir_router_queued_requests{own}))",
        }

    def former_days(self, ahead_seconds: float) -> list[str]:
        """What was needed on former days at the time that comes in `ahead_seconds`."""
        names = {"service_namespace": self.service.namespace, "inference_service": self.service.name, "role": self.role}
        needed = f"kvasir_operator_autoscaling_needed_replicas{_selector(names)}"
        return [f"max({needed} offset {86400 * days - int(ahead_seconds)}s)" for days in _DAYS]

    @property
    def _labels(self) -> dict[str, str]:
        return {"namespace": self.service.namespace, "inference_service": self.service.name}

    @property
    def _selector(self) -> str:
        return _selector(self._labels | {"role": self.role})

    def _selector_of(self, pods: Collection[str]) -> str:
        """A pod's name has no character but the dot that a pattern means otherwise."""
        pattern = "|".join(sorted(pods)).replace(".", r"\.")
        return _selector(self._labels | {"role": self.role}, pod=pattern)

    def _rate(self, name: str) -> Callable[[str], str]:
        return lambda window: f"sum(max by (pod, finish_reason) (rate({name}{self._selector}[{window}])))"

    def _computed(self, window: str) -> str:
        """Prompt tokens that no cache held."""
        queries, hits = map(self._rate, _LOOKUPS)
        return f"{queries(window)} - {hits(window)}"

    def _p90(self, name: str, pods: Collection[str]) -> Callable[[str], str]:
        buckets = f"{name}_bucket{self._selector_of(pods)}"
        return lambda window: f"histogram_quantile(0.9, sum by (le) (max by (pod, le) (rate({buckets}[{window}]))))"


def _over_windows(query: Callable[[str], str]) -> str:
    """Over the short window; over the long one where that holds fewer than two scrapes."""
    long = f'label_replace({query(LONG_WINDOW)}, "window", "{LONG_WINDOW}", "", "")'
    return f"{query(WINDOW)} or on() {long}"


def _of_tenants(series: str) -> str:
    return f"sum by (pod) (max by (pod, service, tenant) ({series}))"


def _growth(by_pod: str) -> str:
    """A second. Of one value a pod: its series, such as tenants', come and go."""
    return f"deriv({by_pod}[{WINDOW}:5s])"


def _selector(labels: dict[str, str], **patterns: str) -> str:
    """A JSON string is a PromQL string."""
    equal = [f"{name}={json.dumps(value)}" for name, value in labels.items()]
    like = [f"{name}=~{json.dumps(value)}" for name, value in patterns.items()]
    return "{" + ",".join(equal + like) + "}"
