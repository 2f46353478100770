"""The series of services, made of their statuses."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvasir_operator.status.series import ServiceCollector

ROLES = [
    {"role": "serve", "desired": 3, "ready": 1, "draining": 1, "message": ""},
    {"role": "router", "desired": 2, "ready": 2, "draining": 0, "message": ""},
]


class Watched:
    """The series after the events that were given."""

    def __init__(self) -> None:
        self.collector, self._registry = ServiceCollector(), CollectorRegistry()
        self._registry.register(self.collector)

    def see(self, event_type: str | None = "MODIFIED", **of: Any) -> "Watched":
        self.collector.watch(event_type, service(**of))
        return self

    def value(self, name: str, **labels: str) -> float | None:
        own = {"service_namespace": "models", "inference_service": "llama"}
        return self._registry.get_sample_value(f"kvasir_operator_service_{name}", own | labels)

    @property
    def num_series(self) -> int:
        return sum(len(family.samples) for family in self._registry.collect())


def service(ready: str | None = "True", suspend: bool = False, phase: str = "Ready") -> dict[str, Any]:
    conditions = [{"type": "Degraded", "status": "True"}]
    conditions += [] if ready is None else [{"type": "Ready", "status": ready}]
    return {
        "metadata": {"namespace": "models", "name": "llama"},
        "spec": {"suspend": suspend},
        "status": {"conditions": conditions, "phase": phase, "roles": ROLES},
    }


@pytest.mark.parametrize(
    ("ready", "value"), [("True", 1.0), ("False", 0.0), ("Unknown", 0.0), pytest.param(None, None, id="no condition")]
)
def test_a_services_condition_ready_is_a_series(ready: str | None, value: float | None) -> None:
    assert Watched().see(ready=ready).value("ready") == value


def test_a_suspended_service_need_not_be_ready() -> None:
    watched = Watched().see(ready="False").see(ready="False", suspend=True, phase="Suspended")
    assert watched.value("ready") is None
    assert watched.value("phase", phase="Suspended") == 1.0


def test_a_service_is_in_one_phase_at_a_time() -> None:
    watched = Watched().see(phase="Loading").see(phase="Ready")
    assert watched.value("phase", phase="Ready") == 1.0
    assert watched.value("phase", phase="Loading") is None


def test_replicas_of_each_role_are_shown_as_wanted_and_as_ready() -> None:
    watched = Watched().see()
    assert [watched.value("desired_replicas", role=role) for role in ("serve", "router")] == [3.0, 2.0]
    assert [watched.value("ready_replicas", role=role) for role in ("serve", "router")] == [1.0, 2.0]


def test_a_service_without_status_has_no_series() -> None:
    watched = Watched()
    watched.collector.watch("MODIFIED", {"metadata": {"namespace": "models", "name": "llama"}, "spec": {}})
    assert watched.num_series == 0


def test_a_service_that_is_gone_leaves_no_series() -> None:
    watched = Watched().see(None)
    assert watched.num_series == 6
    for _ in range(2):  # one that is not known is no error
        watched.see("DELETED")
    assert watched.num_series == 0
