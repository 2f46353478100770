"""Why a pod is not ready, read from its status."""

from typing import Any

import pytest

from kvasir_operator.api.conditions import Reason
from kvasir_operator.waiting import why_deployment_waits, why_pod_waits

from .cluster_objects import deployment, pod, waiting_container

NO_ROOM = "0/3 nodes: insufficient nvidia.com/gpu"
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_ROOM}]
CRASHED: dict[str, Any] = {"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "restartCount": 4}


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        ({"conditions": UNSCHEDULABLE}, Reason.INSUFFICIENT_CAPACITY, "insufficient nvidia.com/gpu"),
        (
            {"containerStatuses": [waiting_container("ImagePullBackOff", "manifest unknown")]},
            Reason.IMAGE_PULL_FAILED,
            "container engine: ImagePullBackOff: manifest unknown",
        ),
        (
            {"containerStatuses": [waiting_container("CreateContainerConfigError", "secret x not found")]},
            Reason.INVALID_CONTAINER_CONFIG,
            "secret x not found",
        ),
        (
            {"containerStatuses": [waiting_container("CrashLoopBackOff", **CRASHED)]},
            Reason.CRASH_LOOPING,
            "ended 4 times, last with exit code 137 (OOMKilled)",
        ),
        ({"containerStatuses": [waiting_container("ContainerCreating")]}, Reason.PULLING_IMAGE, "volume"),
        ({"containerStatuses": []}, Reason.WAITING_FOR_PODS, "no container has been started"),
        (
            {"initContainerStatuses": [{"name": "load", "state": {"running": {}}}], "containerStatuses": []},
            Reason.INITIALIZING,
            "init container",
        ),
        ({}, Reason.LOADING_MODEL, "loading the model"),
    ],
)
def test_each_way_of_waiting_has_its_reason(status: dict[str, Any], reason: Reason, message: str) -> None:
    waiting = why_pod_waits(pod("p", ready=False, **status))
    assert waiting is not None
    assert waiting.reason is reason
    assert message in waiting.message
    assert waiting.message.startswith("pod p: ")


def test_a_container_that_keeps_ending_is_crash_looping_even_while_it_runs() -> None:
    container = {"name": "engine", "state": {"running": {}}, "ready": False, **CRASHED}
    waiting = why_pod_waits(pod("p", ready=False, containerStatuses=[container]))
    assert waiting is not None
    assert waiting.reason is Reason.CRASH_LOOPING


def test_a_router_does_not_load_a_model() -> None:
    waiting = why_pod_waits(pod("p", role="router", ready=False))
    assert waiting is not None
    assert waiting.reason is Reason.STARTING_ROUTER


def test_a_ready_or_leaving_pod_waits_for_nothing() -> None:
    assert why_pod_waits(pod("p")) is None
    assert why_pod_waits(pod("p", ready=False, leaving=True)) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "x" is forbidden: exceeded quota: gpus', Reason.QUOTA_EXCEEDED),
        ("violates PodSecurity restricted", Reason.POD_CREATION_FAILED),
    ],
)
def test_a_deployment_tells_why_it_cannot_make_pods(message: str, reason: Reason) -> None:
    obj = deployment()
    obj["status"]["conditions"] = [{"type": "ReplicaFailure", "status": "True", "message": message}]
    waiting = why_deployment_waits(obj)
    assert waiting is not None
    assert waiting.reason is reason
    assert message in waiting.message


def test_a_deployment_without_trouble_waits_for_nothing() -> None:
    assert why_deployment_waits(deployment()) is None
