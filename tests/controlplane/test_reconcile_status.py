"""Status and Events as a real API server stores them, from the states that real controllers report."""

from datetime import UTC, datetime
from typing import Any

import pytest

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.errors import ChildrenRefusedError
from kvasir_operator.reconcile import Outcome

from .control_plane import ControlPlane
from .processes import wait_until
from .reconciling import (
    NAME,
    conditions,
    get_children,
    get_events,
    get_service,
    manifest,
    run_pass,
    settle,
)

PODS = f"{SERVICE_LABEL}={NAME}"


def test_a_service_becomes_ready_when_its_pods_are(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(manifest(namespace))
    settle(control_plane, namespace)
    waiting = get_service(control_plane, namespace)
    assert waiting["status"]["phase"] == "Pending"
    assert conditions(waiting)["Ready"] == ("False", "WaitingForPods")
    control_plane.mark_pods_ready(namespace, PODS, 4)
    settle(control_plane, namespace)
    status = get_service(control_plane, namespace)["status"]
    assert {key: status[key] for key in ("phase", "replicas", "url", "observedGeneration")} == {
        "phase": "Ready",
        "replicas": 2,
        "url": f"http://{NAME}-router.{namespace}.svc:8080/v1",
        "observedGeneration": 1,
    }
    assert conditions({"status": status}) == {
        "Ready": ("True", "Serving"),
        "ModelLoaded": ("True", "ModelLoaded"),
        "Routable": ("True", "RouterReady"),
        "Progressing": ("False", "RolloutComplete"),
        "Degraded": ("False", "AsExpected"),
    }
    assert [(role["role"], role["desired"], role["ready"]) for role in status["roles"]] == [
        ("serve", 2, 2),
        ("router", 2, 2),
    ]
    assert sorted(reason for reason, _ in get_events(control_plane, namespace)) == ["Created", "Ready"]


def test_the_scale_subresource_shows_and_sets_the_replicas(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(manifest(namespace))
    settle(control_plane, namespace)
    path = f"/apis/serving.kvasir.dev/v1alpha1/namespaces/{namespace}/inferenceservices/{NAME}/scale"
    scale = control_plane.request("get", path)
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)
    assert scale["status"]["selector"] == f"{PODS},serving.kvasir.dev/role=serve"


def test_what_is_not_supported_yet_is_told_and_the_rest_still_runs(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(
        manifest(
            namespace,
            engine={"device": "cpu", "quantization": "int8"},
            router={"mode": "gateway"},
        )
    )
    settle(control_plane, namespace)
    service = get_service(control_plane, namespace)
    (degraded,) = (each for each in service["status"]["conditions"] if each["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "UnsupportedFeature")
    for path in ("spec.engine.quantization", "spec.router.mode"):
        assert f"{path}: " in degraded["message"]
    assert "UnsupportedFeature" in [reason for reason, _ in get_events(control_plane, namespace)]
    assert get_children(control_plane, namespace)


def test_a_failing_image_pull_degrades_and_its_end_is_told_as_recovery(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(manifest(namespace))
    settle(control_plane, namespace)
    control_plane.mark_pods_waiting(namespace, PODS, "ImagePullBackOff", "manifest unknown", 4)
    settle(control_plane, namespace)
    service = get_service(control_plane, namespace)
    assert conditions(service)["Degraded"] == ("True", "ImagePullFailed")
    assert "manifest unknown" in service["status"]["roles"][0]["message"]
    control_plane.mark_pods_ready(namespace, PODS, 4)
    settle(control_plane, namespace)
    reasons = [reason for reason, _ in get_events(control_plane, namespace)]
    assert sorted(reasons) == ["Created", "ImagePullFailed", "Ready", "Recovered"]


def test_a_quota_that_forbids_pods_is_reported(control_plane: ControlPlane, namespace: str) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": namespace}}
    control_plane.apply({**quota, "spec": {"hard": {"pods": "0"}}})
    wait_until(lambda: _quota(control_plane, namespace).get("hard"), 10, "the quota to be counted")
    control_plane.apply(manifest(namespace))

    def is_reported() -> bool:
        run_pass(control_plane, namespace)
        return conditions(get_service(control_plane, namespace))["Degraded"] == ("True", "QuotaExceeded")

    wait_until(is_reported, 30, "the quota to be reported")


def test_a_quota_that_is_raised_lets_the_pods_come_and_the_status_clears(
    control_plane: ControlPlane, namespace: str
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": namespace}}
    control_plane.apply({**quota, "spec": {"hard": {"pods": "0"}}})
    wait_until(lambda: _quota(control_plane, namespace).get("hard"), 10, "the quota to be counted")
    control_plane.apply(manifest(namespace))
    wait_until(lambda: _degraded(control_plane, namespace) == ("True", "QuotaExceeded"), 30, "the quota to be reported")
    control_plane.apply({**quota, "spec": {"hard": {"pods": "9"}}})
    wait_until(lambda: _degraded(control_plane, namespace) == ("False", "AsExpected"), 30, "the status to clear")
    assert "Recovered" in [reason for reason, _ in get_events(control_plane, namespace)]


def _degraded(control_plane: ControlPlane, namespace: str) -> tuple[str, str]:
    run_pass(control_plane, namespace)
    return conditions(get_service(control_plane, namespace))["Degraded"]


def test_a_volume_that_cannot_be_mounted_is_told_from_the_pods_events_until_it_is(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(manifest(namespace))
    settle(control_plane, namespace)
    pods = control_plane.mark_pods_waiting(namespace, PODS, "ContainerCreating", "", 4)
    for pod in pods:
        control_plane.apply(_kubelet_event(pod, "FailedMount", "hostPath type check failed: /m is not a directory"))
    outcome = run_pass(control_plane, namespace).outcome
    assert outcome is not None
    assert outcome.retry_seconds is not None  # no change of a pod would tell of its next Event
    service = get_service(control_plane, namespace)
    assert conditions(service)["Ready"] == ("False", "ModelNotFound")
    assert conditions(service)["Degraded"] == ("True", "ModelNotFound")
    assert "/m is not a directory" in service["status"]["roles"][0]["message"]
    assert run_pass(control_plane, namespace).writes == []
    control_plane.mark_pods_ready(namespace, PODS, 4)
    assert run_pass(control_plane, namespace).outcome == Outcome()
    assert conditions(get_service(control_plane, namespace))["Degraded"] == ("False", "AsExpected")


def _kubelet_event(pod: dict[str, Any], reason: str, message: str) -> dict[str, Any]:
    metadata, now = pod["metadata"], datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {key: metadata[key] for key in ("name", "namespace", "uid")}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{reason.lower()}", "namespace": metadata["namespace"]},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
        "source": {"component": "kubelet", "host": "node-1"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _quota(control_plane: ControlPlane, namespace: str) -> dict[str, object]:
    status: dict[str, object] = control_plane.request("get", f"/api/v1/namespaces/{namespace}/resourcequotas/none")[
        "status"
    ]
    return status


def test_a_quota_that_forbids_children_is_told_and_the_pass_is_tried_again(
    control_plane: ControlPlane, namespace: str
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": namespace}}
    control_plane.apply({**quota, "spec": {"hard": {"services": "0"}}})
    wait_until(lambda: _quota(control_plane, namespace).get("hard"), 10, "the quota to be counted")
    control_plane.apply(manifest(namespace))
    with pytest.raises(ChildrenRefusedError, match=r"Service llama-router: .*exceeded quota"):
        run_pass(control_plane, namespace)
    with pytest.raises(ChildrenRefusedError):
        run_pass(control_plane, namespace)
    assert sorted(reason for reason, _ in get_events(control_plane, namespace)) == ["Created", "QuotaExceeded"]
    assert "Service" not in dict(get_events(control_plane, namespace))["Created"].replace("ServiceAccount", "")
    service = get_service(control_plane, namespace)
    assert conditions(service)["Degraded"] == ("True", "QuotaExceeded")
    kinds = {key.kind.kind for key in get_children(control_plane, namespace)}
    assert kinds == {"Secret", "ServiceAccount", "RoleBinding", "NetworkPolicy", "PodDisruptionBudget", "Deployment"}


def test_an_object_of_somebody_else_is_left_alone_and_told(control_plane: ControlPlane, namespace: str) -> None:
    metadata = {"name": f"{NAME}-engine", "namespace": namespace}
    theirs = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    before = control_plane.apply(theirs)
    control_plane.apply(manifest(namespace))
    outcome = run_pass(control_plane, namespace).outcome
    assert outcome is not None
    assert outcome.retry_seconds is not None
    assert conditions(get_service(control_plane, namespace))["Degraded"] == ("True", "NameTaken")
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{NAME}-engine"
    after = control_plane.request("get", path)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
