"""The operator's own series, in a registry of their own; names and units follow the Prometheus conventions."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.situation import Verdict
from kvasir_operator.kube.kinds import KubeObject, ServiceKey
from kvasir_operator.status.restarts import RestartCounter
from kvasir_operator.status.series import ServiceCollector

_PASS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class OperatorMetrics:
    """Made once near main; the parts get the methods that they call."""

    def __init__(self, services: Callable[[], Iterable[KubeObject]] = tuple) -> None:
        """`services`: those that there are, whose statuses have series."""
        self.registry = CollectorRegistry(auto_describe=True)  # by name, those of the collectors below as well
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self._passes = counter("kvasir_operator_reconcile", "Reconcile passes by result.", ["result"])
        for result in ("success", "error"):
            self._passes.labels(result)
        self._errors = counter("kvasir_operator_reconcile_errors", "Failed passes by error.", ["error"])
        self._duration = Histogram(
            "kvasir_operator_reconcile_duration_seconds",
            "Time of one pass.",
            buckets=_PASS_BUCKETS,
            registry=self.registry,
        )
        self._requests = counter(
            "kvasir_operator_api_requests",
            "Requests for objects to the API server, by verb, kind and result: success, or the error that came of it.",
            ["verb", "kind", "result"],
        )
        self._queue_depth = gauge("kvasir_operator_queue_depth", "Services that are due and wait for a worker.")
        self._longest_wait = gauge(
            "kvasir_operator_queue_longest_wait_seconds",
            "How long the oldest service that is due has waited for a worker, or the oldest pass has run.",
        )
        self._leader = gauge("kvasir_operator_leader", "1 where this process reconciles, 0 where it stands by.")

        role_labels = ["service_namespace", "inference_service", "role"]
        prefix = "kvasir_operator_autoscaling"
        self._wanted_replicas = gauge(
            f"{prefix}_wanted_replicas", "Replicas that an autoscaled role is to have.", role_labels
        )
        self._needed_replicas = gauge(
            f"{prefix}_needed_replicas",
            "Replicas that the demand on a role comes to, before bounds, windows and policies.",
            role_labels,
        )
        self._held_scaling = gauge(f"{prefix}_held", "1 where a role stays as it is for a fault.", role_labels)
        self._scaling_decisions = counter(
            f"{prefix}_decisions", "Decisions that changed a role's replicas, by reason.", [*role_labels, "reason"]
        )
        self._scaling_errors = counter(
            f"{prefix}_errors", "Decisions that a fault of the operator prevented.", ["error"]
        )

        self.restarts = RestartCounter()
        self.registry.register(ServiceCollector(services))
        self.registry.register(self.restarts)

    def show_scaling(
        self, service: ServiceKey, verdicts: Mapping[str, Verdict], changed: Mapping[str, Verdict]
    ) -> None:
        """What was decided last, by role; `changed` are those of it that made a difference.

        Reasons that have not come up are there with 0: Prometheus sees no increase in a series that begins with 1.
        """
        for role, verdict in verdicts.items():
            labels = (*service, role)
            for reason in ScalingReason:
                self._scaling_decisions.labels(*labels, reason)
            self._wanted_replicas.labels(*labels).set(verdict.replicas)
            self._held_scaling.labels(*labels).set(verdict.is_faulty)
            if verdict.needed is not None:
                self._needed_replicas.labels(*labels).set(verdict.needed)
        for role, verdict in changed.items():
            self._scaling_decisions.labels(*service, role, verdict.reason).inc()

    def count_scaling_error(self, error: Exception) -> None:
        self._scaling_errors.labels(type(error).__name__).inc()

    def forget_scaling(self, service: ServiceKey) -> None:
        of_service = {"service_namespace": service.namespace, "inference_service": service.name}
        for series in (self._wanted_replicas, self._needed_replicas, self._held_scaling, self._scaling_decisions):
            series.remove_by_labels(of_service)

    def count_request(self, verb: str, kind: str, error: Exception | None) -> None:
        self._requests.labels(verb, kind, "success" if error is None else type(error).__name__).inc()

    def count_pass(self, seconds: float, error: Exception | None) -> None:
        self._duration.observe(seconds)
        self._passes.labels("error" if error else "success").inc()
        if error is not None:
            self._errors.labels(type(error).__name__).inc()

    def watch_queue(self, depth: Callable[[], int], longest_wait_seconds: Callable[[], float]) -> None:
        self._queue_depth.set_function(depth)
        self._longest_wait.set_function(longest_wait_seconds)

    def set_leader(self, is_leader: bool) -> None:
        self._leader.set(1 if is_leader else 0)
