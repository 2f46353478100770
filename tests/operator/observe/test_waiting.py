"""Why a pod is not ready, read from its status."""

import copy
from typing import Any

import pytest
from tests.operator.cluster_objects import NOW, deployment, pod, pod_event, waiting_container

from kvasir_operator.api.conditions import Reason
from kvasir_operator.observe.waiting import why_deployment_waits, why_pod_waits

NO_ROOM = "0/3 nodes: insufficient nvidia.com/gpu"
NO_CLAIM = '0/3 nodes are available: persistentvolumeclaim "checkpoints" not found.'
UNBOUND = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."
NO_FOLDER = 'MountVolume.SetUp failed for volume "model" : hostPath type check failed: /nowhere is not a directory'
EARLIER = "2026-11-20T09:59:00Z"
CREATING = [waiting_container("ContainerCreating")]


def unschedulable(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [condition], "containerStatuses": []}


def running(at: str = NOW, **fields: Any) -> dict[str, Any]:
    """Up since `at`, in a pod that became unready NOW."""
    state = {"running": {"startedAt": at}}
    container = {"name": "engine", "state": state, "ready": False, "restartCount": 0, **fields}
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": NOW}
    return {"containerStatuses": [container], "conditions": [unready]}


def run_again(exit_code: int) -> dict[str, Any]:
    """An init container in its fourth run, as on a node that was restarted."""
    ended = {"terminated": {"exitCode": exit_code, "reason": "Completed"}}
    state: dict[str, Any] = {"running": {}}
    return {"name": "prepare", "state": state, "lastState": ended, "ready": False, "restartCount": 3}


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (unschedulable(NO_ROOM), Reason.INSUFFICIENT_CAPACITY, "insufficient nvidia.com/gpu"),
        (unschedulable(NO_CLAIM), Reason.VOLUME_UNAVAILABLE, '"checkpoints" not found'),
        (unschedulable(UNBOUND), Reason.VOLUME_UNAVAILABLE, "unbound"),
        (
            {"containerStatuses": [waiting_container("ImagePullBackOff", "manifest unknown")]},
            Reason.IMAGE_PULL_FAILED,
            "container engine: ImagePullBackOff: manifest unknown",
        ),
        (
            {"initContainerStatuses": [waiting_container("CrashLoopBackOff")], "containerStatuses": CREATING},
            Reason.CRASH_LOOPING,
            "ended for an unknown reason",
        ),
        ({"containerStatuses": CREATING}, Reason.PULLING_IMAGE, "volume"),
        ({"containerStatuses": []}, Reason.WAITING_FOR_PODS, "no container has been started"),
        (
            {"initContainerStatuses": [{"name": "load", "state": {"running": {}}}], "containerStatuses": []},
            Reason.INITIALIZING,
            "init container",
        ),
        (
            {"initContainerStatuses": [run_again(0)], "containerStatuses": CREATING},
            Reason.INITIALIZING,
            "init container prepare is running",
        ),
        (
            {"initContainerStatuses": [run_again(1)], "containerStatuses": CREATING},
            Reason.CRASH_LOOPING,
            "container prepare was restarted 3 times",
        ),
        ({}, Reason.LOADING_MODEL, "loading the model"),
        (running(started=True, at=NOW), Reason.LOADING_MODEL, "loading the model"),
        (running(started=True, at=EARLIER), Reason.NOT_RESPONDING, "readiness probe fails"),
        (running(started=True, ready=True), Reason.NODE_NOT_READY, "no longer reports"),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]},
            Reason.SCHEDULING_GATED,
            "scheduling waits",
        ),
    ],
)
def test_each_way_of_waiting_has_its_reason(status: dict[str, Any], reason: Reason, message: str) -> None:
    waiting = why_pod_waits(pod("p", ready=False, **status))
    assert waiting is not None
    assert waiting.reason is reason
    assert message in waiting.message
    assert waiting.message.startswith("pod p: ")


def beside_the_engine(engine: dict[str, Any], *, proxy_is_ready: bool, is_native: bool) -> dict[str, Any]:
    """A pod with a service mesh's proxy, as an init container that stays up or as a container like any other."""
    up = {"running": {"startedAt": EARLIER}}
    proxy = {"name": "istio-proxy", "state": up, "ready": proxy_is_ready, "started": True, "restartCount": 3}
    obj = pod("p", ready=False, **engine)
    obj["spec"] |= {"nodeName": "n", "initContainers": [{"name": "istio-proxy", "restartPolicy": "Always"}] * is_native}
    obj["status"].setdefault("initContainerStatuses" if is_native else "containerStatuses", []).append(proxy)
    return obj


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize(
    ("engine", "proxy_is_ready", "reason"),
    [
        ({"containerStatuses": CREATING}, True, Reason.PULLING_IMAGE),
        (running(started=True), True, Reason.LOADING_MODEL),
        (running(started=True), False, Reason.LOADING_MODEL),
        (running(started=True, at=EARLIER), True, Reason.NOT_RESPONDING),
        (running(started=True, ready=True), True, Reason.NODE_NOT_READY),
        (running(started=True, ready=True), False, Reason.SIDECAR_NOT_READY),
    ],
)
def test_a_sidecar_does_not_speak_for_the_engine(
    engine: dict[str, Any], proxy_is_ready: bool, reason: Reason, is_native: bool
) -> None:
    waiting = why_pod_waits(
        beside_the_engine(copy.deepcopy(engine), proxy_is_ready=proxy_is_ready, is_native=is_native)
    )
    assert waiting is not None
    assert waiting.reason is reason


def gated(gate_status: str) -> dict[str, Any]:
    """A pod whose container is ready, on a node, with two readiness gates."""
    obj = pod("p", ready=False, **running(started=True, ready=True))
    obj["status"]["conditions"] += [{"type": "lb.example.com/a", "status": gate_status}]
    gates = [{"conditionType": "lb.example.com/a"}, {"conditionType": "lb.example.com/b"}]
    return {**obj, "spec": {"nodeName": "n", "readinessGates": gates}}


def test_readiness_gates_that_are_not_true_are_named() -> None:
    waiting = why_pod_waits(gated("True"))
    assert waiting is not None
    assert waiting.reason is Reason.READINESS_GATE_CLOSED
    assert waiting.message.endswith("readiness gates not yet true: lb.example.com/b")


def test_a_gate_that_is_false_is_as_closed_as_one_that_nobody_has_set() -> None:
    waiting = why_pod_waits(gated("False"))
    assert waiting is not None
    assert waiting.message.endswith("lb.example.com/a, lb.example.com/b")


def test_a_pod_behind_scheduling_gates_names_them() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    obj = {**pod("p", ready=False, conditions=[condition]), "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/a"}]}}
    waiting = why_pod_waits(obj)
    assert waiting is not None
    assert (waiting.reason, "kueue.x-k8s.io/a" in waiting.message) == (Reason.SCHEDULING_GATED, True)


def test_events_tell_why_containers_are_not_made() -> None:
    waiting = why_pod_waits(pod("p", ready=False, containerStatuses=CREATING), [pod_event("FailedMount", NO_FOLDER)])
    assert waiting is not None
    assert waiting.reason is Reason.MODEL_NOT_FOUND
    assert waiting.message == f"pod p: FailedMount on node node-1: {NO_FOLDER}"


def test_a_router_does_not_load_a_model() -> None:
    waiting = why_pod_waits(pod("p", role="router", ready=False))
    assert waiting is not None
    assert waiting.reason is Reason.STARTING_ROUTER


def test_a_pod_that_is_ready_or_leaving_or_given_up_waits_for_nothing() -> None:
    assert why_pod_waits(pod("p")) is None
    assert why_pod_waits(pod("p", ready=False, leaving=True)) is None
    assert why_pod_waits(pod("p", ready=False, phase="Failed", reason="Evicted")) is None


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
