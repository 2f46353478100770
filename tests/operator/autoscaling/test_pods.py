"""What pods' own times say."""

from typing import Any

import pytest

from kvasir_operator.api.labels import ROLE_LABEL
from kvasir_operator.autoscaling.pods import (
    DEFAULT_STARTUP_SECONDS,
    LEAST_STARTUP_SECONDS,
    MOST_STARTUP_SECONDS,
    is_beginning,
    startup_seconds,
)
from kvasir_operator.autoscaling.situation import COLD_SECONDS


def moment(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"1970-01-01T{hours:02}:{rest // 60:02}:{rest % 60:02}Z"


def pod(name: str, ready_at: float, role: str = "serve", num_restarts: int = 0) -> dict[str, Any]:
    """Made at 0."""
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": moment(ready_at)}
    metadata = {"name": name, "labels": {ROLE_LABEL: role}, "creationTimestamp": moment(0)}
    containers = [{"name": "engine", "restartCount": num_restarts}]
    return {"metadata": metadata, "status": {"conditions": [ready], "containerStatuses": containers}}


@pytest.mark.parametrize(
    ("ready_at", "expected"),
    [
        ((40, 60, 200), 60),
        ((1,), LEAST_STARTUP_SECONDS),
        ((MOST_STARTUP_SECONDS,), MOST_STARTUP_SECONDS),
        ((MOST_STARTUP_SECONDS + 1,), DEFAULT_STARTUP_SECONDS),
        ((MOST_STARTUP_SECONDS + 1, 40), 40),
        ((), DEFAULT_STARTUP_SECONDS),
    ],
)
def test_a_start_takes_what_the_median_took_of_those_that_have_not_come_back(ready_at: Any, expected: float) -> None:
    assert startup_seconds([pod(f"pod-{at}", at) for at in ready_at], "serve") == expected


@pytest.mark.parametrize(("others", "expected"), [((40, 50), 45), ((), DEFAULT_STARTUP_SECONDS)])
def test_a_restart_in_place_is_no_start(others: Any, expected: float) -> None:
    restarted = pod("restarted", 1000, num_restarts=1)
    assert startup_seconds([restarted, *(pod(f"pod-{at}", at) for at in others)], "serve") == expected


@pytest.mark.parametrize(("now", "expected"), [(COLD_SECONDS - 1, True), (COLD_SECONDS, False)])
@pytest.mark.parametrize("role", ["serve", "router"])
def test_a_service_begins_until_an_engine_or_a_router_could_have_series(role: str, now: float, expected: bool) -> None:
    assert is_beginning([pod("pod", 0, role)], "serve", now) is expected


def test_other_roles_do_not_count_as_begun() -> None:
    assert is_beginning([pod("pod", 0, "prefill")], "decode", 1000)
