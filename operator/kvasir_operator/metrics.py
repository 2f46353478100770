"""The operator's own series, in a registry of their own; names and units follow the Prometheus conventions."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvasir_operator.api.conditions import ConditionType, find_condition

_PASS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class OperatorMetrics:
    """Made once near main; the parts get the methods that they call."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._passes = Counter(
            "kvasir_operator_reconcile", "Reconcile passes by result.", ["result"], registry=self.registry
        )
        self._errors = Counter(
            "kvasir_operator_reconcile_errors", "Failed passes by error.", ["error"], registry=self.registry
        )
        self._duration = Histogram(
            "kvasir_operator_reconcile_duration_seconds",
            "Time of one pass.",
            buckets=_PASS_BUCKETS,
            registry=self.registry,
        )
        self._writes = Counter(
            "kvasir_operator_api_writes",
            "Writes that the API server accepted, by verb and kind.",
            ["verb", "kind"],
            registry=self.registry,
        )
        self._queue_depth = Gauge(
            "kvasir_operator_queue_depth", "Services that are due and wait for a worker.", registry=self.registry
        )
        self._leader = Gauge(
            "kvasir_operator_leader", "1 where this process reconciles, 0 where it stands by.", registry=self.registry
        )
        self._ready = Gauge(
            "kvasir_operator_service_ready",
            "1 where a service's condition Ready is true, 0 where it is not; none of a suspended service.",
            ["service_namespace", "inference_service"],
            registry=self.registry,
        )

    def count_write(self, verb: str, kind: str) -> None:
        self._writes.labels(verb, kind).inc()

    def count_pass(self, seconds: float, error: Exception | None) -> None:
        self._duration.observe(seconds)
        self._passes.labels("error" if error else "success").inc()
        if error is not None:
            self._errors.labels(type(error).__name__).inc()

    def watch_queue(self, depth: Callable[[], int]) -> None:
        self._queue_depth.set_function(depth)

    def set_leader(self, is_leader: bool) -> None:
        self._leader.set(1 if is_leader else 0)

    def watch_service(self, event_type: str | None, service: Mapping[str, Any]) -> None:
        """Takes over the condition Ready of an InferenceService from an event of its watch."""
        metadata = service["metadata"]
        labels = (metadata["namespace"], metadata["name"])
        ready = find_condition(service.get("status", {}).get("conditions", []), ConditionType.READY)
        if event_type == "DELETED" or ready is None or service["spec"].get("suspend"):
            self._ready.remove(*labels)
        else:
            self._ready.labels(*labels).set(ready["status"] == "True")
