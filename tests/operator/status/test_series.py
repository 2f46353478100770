"""The series of services, made of their statuses."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvasir_operator.status.series import ServiceCollector

ROLES = [
    {"role": "serve", "desired": 3, "ready": 1, "draining": 1, "message": ""},
    {"role": "router", "desired": 2, "ready": 2, "draining": 0, "message": ""},
]


class Shown:
    """The series of the services that there are."""

    def __init__(self, *services: dict[str, Any]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(ServiceCollector(lambda: services))

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
    assert Shown(service(ready)).value("ready") == value


def test_a_suspended_service_need_not_be_ready() -> None:
    shown = Shown(service("False", suspend=True, phase="Suspended"))
    assert shown.value("ready") is None
    assert shown.value("phase", phase="Suspended") == 1.0


def test_of_its_phases_a_service_shows_the_one_that_it_is_in() -> None:
    shown = Shown(service(phase="Ready"))
    assert shown.value("phase", phase="Ready") == 1.0
    assert shown.value("phase", phase="Loading") is None


def test_replicas_of_each_role_are_shown_as_wanted_and_as_ready() -> None:
    shown = Shown(service())
    assert [shown.value("desired_replicas", role=role) for role in ("serve", "router")] == [3.0, 2.0]
    assert [shown.value("ready_replicas", role=role) for role in ("serve", "router")] == [1.0, 2.0]


def test_a_service_without_status_has_no_series() -> None:
    assert Shown(service()).num_series == 6
    assert Shown({"metadata": {"namespace": "models", "name": "llama"}, "spec": {}}).num_series == 0
