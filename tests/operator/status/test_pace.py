"""Which changes of a status are stored at once, and which once a second."""

from typing import Any

import pytest
from tests.operator.cluster_objects import deployment, pod
from tests.operator.status.service_under_test import status_of

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.status.pace import DETAILS_SECONDS, StatusPace

KEY = ServiceKey("models", "llama")
STATUS = status_of([deployment()], [pod("e1"), pod("e2"), pod("r1", "router")])


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def changed(path: str, **fields: Any) -> dict[str, Any]:
    """STATUS with fields of its first role, or first condition, replaced."""
    first, *others = STATUS[path]
    return {**STATUS, path: [{**first, **fields}, *others]}


def wait_seconds(status: dict[str, Any], seconds_since: float = 0.25, previous: dict[str, Any] = STATUS) -> float:
    clock = Clock()
    pace = StatusPace(clock)
    pace.stored(KEY)
    clock.now += seconds_since
    return pace.wait_seconds(KEY, previous, status)


DETAILS = [
    {**STATUS, "replicas": 1},
    changed("roles", message="m"),
    changed("roles", draining=1),
    changed("conditions", message="m"),
]
AT_ONCE = [
    {**STATUS, "observedGeneration": 4},
    {**STATUS, "phase": "Degraded"},
    {**STATUS, "ready": "1/2"},
    {**STATUS, "scaling": [{"role": "serve"}]},
    {key: value for key, value in STATUS.items() if key != "url"},
    changed("roles", ready=0),
    changed("roles", desired=3),
    changed("roles", revision="bbbb"),
    changed("conditions", reason="Idle"),
    changed("conditions", status="False"),
]


@pytest.mark.parametrize("status", DETAILS)
def test_details_are_stored_once_a_second(status: dict[str, Any]) -> None:
    assert wait_seconds(status) == DETAILS_SECONDS - 0.25
    assert wait_seconds(status, DETAILS_SECONDS) == 0.0
    assert wait_seconds(status, 60.0) == 0.0


@pytest.mark.parametrize("status", AT_ONCE)
def test_what_is_waited_for_is_stored_at_once(status: dict[str, Any]) -> None:
    assert wait_seconds(status) == 0.0


def test_conditions_of_other_controllers_make_nothing_more_urgent() -> None:
    others = {**STATUS, "conditions": [{**STATUS["conditions"][0], "type": "Audited"}, *STATUS["conditions"]]}
    assert wait_seconds(DETAILS[0], previous=others) == DETAILS_SECONDS - 0.25


def test_a_process_and_a_namesake_begin_at_once() -> None:
    pace = StatusPace(Clock())
    assert pace.wait_seconds(KEY, STATUS, DETAILS[0]) == 0.0
    pace.stored(KEY)
    pace.forget(KEY)
    assert pace.wait_seconds(KEY, STATUS, DETAILS[0]) == 0.0
