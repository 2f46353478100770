"""Why a container fails, read from its status."""

import json
from typing import Any

import pytest
from tests.operator.cluster_objects import NOW, waiting_container

from kvasir_operator.api.conditions import Reason
from kvasir_operator.observe.containers import why_container_fails

NO_CONFIG = "kvasir-runtime: error: MODEL is /models/m, which has no config.json"
IN_JSON = json.dumps(
    {"level": "error", "message": "the engine core failed", "exception": "Traceback\n  a\nMemoryError: 2 GiB"}
)


def ended(exit_code: int = 2, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}


def running(**fields: Any) -> dict[str, Any]:
    """A container that is up again after an end, as `fields` have it."""
    return {"name": "engine", "state": {"running": {}}, "ready": False, "started": False, **fields}


@pytest.mark.parametrize(
    ("container", "reason", "message"),
    [
        (
            waiting_container("ImagePullBackOff", "manifest unknown"),
            Reason.IMAGE_PULL_FAILED,
            "container engine: ImagePullBackOff: manifest unknown",
        ),
        (
            waiting_container("CreateContainerConfigError", 'secret "x" not found'),
            Reason.INVALID_CONTAINER_CONFIG,
            'container engine: CreateContainerConfigError: secret "x" not found',
        ),
        (
            waiting_container("RunContainerError", "executable file not found in $PATH"),
            Reason.INVALID_CONTAINER_CONFIG,
            "container engine: RunContainerError: executable file not found in $PATH",
        ),
        (
            {**running(restartCount=0), "state": ended(message=f"loading\n{NO_CONFIG}\n")},
            Reason.CONTAINER_FAILED,
            f"container engine ended with exit code 2 (Error): {NO_CONFIG}",
        ),
        (
            {**running(restartCount=0), "state": ended(message=f"{IN_JSON}\n")},
            Reason.CONTAINER_FAILED,
            "container engine ended with exit code 2 (Error): the engine core failed: MemoryError: 2 GiB",
        ),
        (
            {**running(restartCount=0), "state": ended(message='{"error": "of a sidecar"}')},
            Reason.CONTAINER_FAILED,
            'container engine ended with exit code 2 (Error): {"error": "of a sidecar"}',
        ),
        (
            running(restartCount=1, lastState=ended(137, reason="OOMKilled")),
            Reason.CONTAINER_FAILED,
            "container engine ended with exit code 137 (OOMKilled)",
        ),
        (
            waiting_container("CrashLoopBackOff", restartCount=1, lastState=ended(message=NO_CONFIG)),
            Reason.CRASH_LOOPING,
            f"container engine was restarted 1 times and last ended with exit code 2 (Error): {NO_CONFIG}",
        ),
        (
            running(restartCount=2, lastState=ended(0, reason="Completed")),
            Reason.CRASH_LOOPING,
            "container engine was restarted 2 times and last ended with exit code 0 (Completed)",
        ),
    ],
)
def test_each_failure_has_its_reason(container: dict[str, Any], reason: Reason, message: str) -> None:
    assert why_container_fails(container) == (reason, message)


@pytest.mark.parametrize(
    "container",
    [
        waiting_container("ContainerCreating"),
        running(restartCount=0),
        running(restartCount=1, lastState=ended(0, reason="Completed")),
        {**running(restartCount=0), "state": {"terminated": {"exitCode": 0, "finishedAt": NOW}}, "ready": True},
        running(restartCount=5, lastState=ended(1), started=True),
    ],
    ids=["not tried yet", "first start", "ended well once", "a finished init container", "has got over its start"],
)
def test_what_has_not_failed_is_no_failure(container: dict[str, Any]) -> None:
    assert why_container_fails(container) is None


def test_the_last_line_that_speaks_of_an_error_is_told_and_cut_to_a_bound() -> None:
    log = f"INFO up\nValueError: {'x' * 9000}\nINFO draining: 0 requests in flight\n"
    failure = why_container_fails({**running(restartCount=0), "state": ended(message=log)})
    assert failure is not None
    assert "(Error): ValueError: xxx" in failure[1]
    assert len(failure[1]) < 600


def test_without_an_error_the_last_line_is_told() -> None:
    failure = why_container_fails({**running(restartCount=0), "state": ended(message="one\ntwo\n\n")})
    assert failure is not None
    assert failure[1].endswith("(Error): two")
