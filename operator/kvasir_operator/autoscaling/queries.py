"""Every PromQL expression that the autoscaler asks, and nothing else; metric names are the engine's and the router's.

Each is about all services at once, however many they are, and its answers say whose they are by labels: `namespace`,
`inference_service` and `role`, which PodMonitors give, and `service`, by which routers and gateways name one. A pod
that is scraped twice, by two jobs or by a pair of servers, counts once: of series that differ in others' labels, the
highest.
"""

import json
from collections.abc import Callable, Collection

WINDOW_SECONDS, LONG_WINDOW_SECONDS = 60.0, 120.0
"""Of rates and latencies: short, so that a burst is seen while it lasts; long where scrapes are far apart."""
WINDOW, LONG_WINDOW = "1m", "2m"
_DAYS = (1, 2, 3, 7)
_LOOKUPS = ("kvasir_prefix_cache_queries_total", "kvasir_prefix_cache_hits_total")
_BY_ROLE = "namespace, inference_service, role"


class Queries:
    """About the services of these namespaces; about all where none is named."""

    def __init__(self, namespaces: Collection[str] = ()) -> None:
        self._namespaces = "|".join(sorted(namespaces))

    def by_pod(self) -> dict[str, str]:
        """A value for each engine pod."""
        waiting = ("kvasir_num_requests_waiting", "kvasir_num_requests_held")
        return {
            "kv_used_tokens": _of_pods(f"avg_over_time({self._engines('kvasir_kv_cache_used_tokens')}[{WINDOW}])"),
            "kv_used_tokens_now": self._gauge("kvasir_kv_cache_used_tokens"),
            "kv_capacity_tokens": self._gauge("kvasir_kv_cache_capacity_tokens"),
            "num_running": self._gauge("kvasir_num_requests_running"),
            "num_waiting": " + ".join(map(self._gauge, waiting)),
            "uncached_tokens": self._gauge("kvasir_uncached_tokens"),
            "computed_tokens": " - ".join(map(self._gauge, _LOOKUPS)),
            "uncached_tokens_growth": _growth(self._gauge("kvasir_uncached_tokens")),
            "prefill_tokens_per_second": self._gauge("kvasir_prefill_tokens_per_second"),
            "scraped_at": _of_pods(f"timestamp({self._engines('kvasir_kv_cache_capacity_tokens')})"),
        }

    def of_role(self) -> dict[str, str]:
        """One value a role, with the label `window` where it is over the long one.

        Prompts count as computed, and looked up in the cache, once they begin; what waits is a gauge's growth.
        Latencies are those of pods that are scraped still: one that was slow and is gone calls for nothing. Rates are
        not: what arrived at it arrives still.
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
            **{name: _over_windows(self._p90(metric)) for name, metric in latencies.items()},
        }

    def held(self) -> dict[str, str]:
        """By service and router pod: what waits there for an engine, how it grows, and when that was read."""
        requests, tokens = (f"kvasir_router_queued_{each}{self._held_selector}" for each in ("requests", "tokens"))
        return {
            "num_held": _of_tenants(requests),
            "held_tokens": _of_tenants(tokens),
            "held_tokens_growth": _growth(_of_tenants(tokens)),
            "scraped_at": f"max by (service, pod) (timestamp({requests}))",
        }

    def former_days(self, ahead_seconds: float) -> str:
        """What was needed on former days at the time that comes in `ahead_seconds`, by role and by label `day`."""
        where = self._selector(service_namespace=self._namespaces)
        offsets = {day: 86400 * day - int(ahead_seconds) for day in _DAYS}
        return " or ".join(
            f"label_replace(max by (service_namespace, inference_service, role) "
            f'(kvasir_operator_autoscaling_needed_replicas{where} offset {offset}s), "day", "{day}", "", "")'
            for day, offset in offsets.items()
        )

    def _engines(self, name: str) -> str:
        return name + self._selector(namespace=self._namespaces, role="serve|prefill|decode")

    @property
    def _held_selector(self) -> str:
        """A gateway may be in another namespace than the service."""
        return self._selector(service=self._namespaces and f"({self._namespaces})/.+")

    def _selector(self, **patterns: str) -> str:
        texts = [f"{label}=~{json.dumps(pattern)}" for label, pattern in patterns.items() if pattern]
        return f"{{{','.join(texts)}}}" if texts else ""

    def _gauge(self, name: str) -> str:
        return _of_pods(self._engines(name))

    def _rate(self, name: str) -> Callable[[str], str]:
        by_pod = f"{_BY_ROLE}, pod, finish_reason"
        return lambda window: f"sum by ({_BY_ROLE}) (max by ({by_pod}) (rate({self._engines(name)}[{window}])))"

    def _computed(self, window: str) -> str:
        """Prompt tokens that no cache held."""
        queries, hits = map(self._rate, _LOOKUPS)
        return f"{queries(window)} - {hits(window)}"

    def _p90(self, name: str) -> Callable[[str], str]:
        buckets = self._engines(f"{name}_bucket")
        scraped = f"and on (namespace, pod) {self._engines('kvasir_kv_cache_capacity_tokens')}"

        def over(window: str) -> str:
            by_pod = f"max by ({_BY_ROLE}, pod, le) (rate({buckets}[{window}])) {scraped}"
            return f"histogram_quantile(0.9, sum by ({_BY_ROLE}, le) ({by_pod}))"

        return over


def _of_pods(series: str) -> str:
    return f"max by ({_BY_ROLE}, pod) ({series})"


def _over_windows(query: Callable[[str], str]) -> str:
    """Over the short window; over the long one where that holds fewer than two scrapes."""
    long = f'label_replace({query(LONG_WINDOW)}, "window", "{LONG_WINDOW}", "", "")'
    return f"{query(WINDOW)} or on ({_BY_ROLE}) {long}"


def _of_tenants(series: str) -> str:
    return f"sum by (service, pod) (max by (service, pod, tenant) ({series}))"


def _growth(by_pod: str) -> str:
    """A second. Of one value a pod: its series, such as tenants', come and go."""
    return f"deriv({by_pod}[{WINDOW}:5s])"
