"""What services' statuses say, as series made when they are scraped.

One for whether it is Ready and one for its phase, and two for each of its roles.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvasir_operator.api.conditions import ConditionType, find_condition
from kvasir_operator.kube.kinds import KubeObject, service_key

_LABELS = ("service_namespace", "inference_service")


class ServiceCollector(Collector):
    def __init__(self, services: Callable[[], Iterable[KubeObject]]) -> None:
        """`services`: those that there are."""
        self._services = services

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ready = _gauge("ready", "1 where its condition Ready is true, 0 where it is not; none of a suspended service.")
        phase = _gauge("phase", "1 for the phase that a service is in; the others are absent.", "phase")
        desired = _gauge("desired_replicas", "Replicas that a role is to have, over all revisions.", "role")
        staffed = _gauge("ready_replicas", "Replicas of a role that take requests.", "role")
        for service in self._services():
            key, status = service_key(service), service.get("status", {})
            is_ready = find_condition(status.get("conditions", []), ConditionType.READY)
            if is_ready is not None and not service["spec"].get("suspend"):
                ready.add_metric(key, is_ready["status"] == "True")
            if "phase" in status:
                phase.add_metric([*key, status["phase"]], 1)
            for role in status.get("roles", []):
                desired.add_metric([*key, role["role"]], role["desired"])
                staffed.add_metric([*key, role["role"]], role["ready"])
        yield from (ready, phase, desired, staffed)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvasir_operator_service_{name}", text, labels=[*_LABELS, *labels])
