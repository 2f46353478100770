"""What services' statuses say, as series made when they are scraped: a service that is gone leaves none behind.

One for whether it is Ready and one for its phase, and two for each of its roles.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvasir_operator.api.conditions import ConditionType, find_condition
from kvasir_operator.kube.kinds import ServiceKey, service_key

_LABELS = ("service_namespace", "inference_service")


@dataclass(frozen=True)
class _Shown:
    """Of one service's status. `is_ready` and `phase` None: it does not say, or need not be ready."""

    is_ready: bool | None
    phase: str | None
    replicas: tuple[tuple[str, int, int], ...]
    """(role, desired, ready)"""


class ServiceCollector(Collector):
    """Follows the watch of services."""

    def __init__(self) -> None:
        self._services: dict[ServiceKey, _Shown] = {}

    def watch(self, event_type: str | None, service: Mapping[str, Any]) -> None:
        """Takes over the status of an InferenceService from an event of its watch."""
        key = service_key(service)
        if event_type == "DELETED":
            self._services.pop(key, None)
        else:
            self._services[key] = _shown(service)

    def forget(self, key: ServiceKey) -> None:
        """The service is gone, which a watch that was broken does not show."""
        self._services.pop(key, None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ready = _gauge("ready", "1 where its condition Ready is true, 0 where it is not; none of a suspended service.")
        phase = _gauge("phase", "1 for the phase that a service is in; the others are absent.", "phase")
        desired = _gauge("desired_replicas", "Replicas that a role is to have, over all revisions.", "role")
        staffed = _gauge("ready_replicas", "Replicas of a role that take requests.", "role")
        for key, shown in self._services.items():
            if shown.is_ready is not None:
                ready.add_metric(key, shown.is_ready)
            if shown.phase is not None:
                phase.add_metric([*key, shown.phase], 1)
            for role, num_desired, num_ready in shown.replicas:
                desired.add_metric([*key, role], num_desired)
                staffed.add_metric([*key, role], num_ready)
        yield from (ready, phase, desired, staffed)


def _shown(service: Mapping[str, Any]) -> _Shown:
    status = service.get("status", {})
    ready = find_condition(status.get("conditions", []), ConditionType.READY)
    return _Shown(
        is_ready=None if ready is None or service["spec"].get("suspend") else ready["status"] == "True",
        phase=status.get("phase"),
        replicas=tuple((role["role"], role["desired"], role["ready"]) for role in status.get("roles", [])),
    )


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvasir_operator_service_{name}", text, labels=[*_LABELS, *labels])
