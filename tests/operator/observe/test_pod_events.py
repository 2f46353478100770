"""What Events say of pods whose containers cannot be made yet."""

from typing import Any

import pytest
from tests.operator.cluster_objects import NOW, pod, pod_event, waiting_container

from kvasir_operator.api.conditions import Reason
from kvasir_operator.observe.pod_events import look_again_seconds, pods_to_ask, why_creation_fails

NO_FOLDER = 'MountVolume.SetUp failed for volume "model" : hostPath type check failed: /nowhere is not a directory'
NO_SECRET = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'
SUMMARY = "Unable to attach or mount volumes: unmounted volumes=[model]: timed out waiting for the condition"
LATER = "2026-11-20T10:02:00Z"


def creating(name: str, role: str = "serve", **fields: Any) -> dict[str, Any]:
    return pod(name, role, ready=False, containerStatuses=[waiting_container("ContainerCreating")], **fields)


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("FailedMount", NO_FOLDER, Reason.MODEL_NOT_FOUND),
        ("FailedMount", NO_FOLDER.replace('"model"', '"model-cache"'), Reason.CACHE_UNAVAILABLE),
        ("FailedMount", NO_SECRET, Reason.SECRET_NOT_FOUND),
        ("FailedMount", 'secrets "keys" not found', Reason.SECRET_NOT_FOUND),
        ("FailedMount", 'configmap "c" not found', Reason.VOLUME_UNAVAILABLE),
        ("FailedAttachVolume", "AttachVolume.Attach failed for volume pv", Reason.VOLUME_UNAVAILABLE),
        ("FailedCreatePodSandBox", "no IP addresses left", Reason.POD_CREATION_FAILED),
    ],
)
def test_a_failure_is_told_with_its_node(reason: str, message: str, expected: Reason) -> None:
    events = [pod_event("Scheduled"), pod_event(reason, message)]
    assert why_creation_fails(events) == (expected, f"{reason} on node node-1: {message}")


def test_a_claim_that_another_node_holds_is_named_with_what_to_write_instead() -> None:
    shared = "Multi-Attach error for volume pv Volume is already used by pod(s) llama-serve-0123456789-abcde"
    failure = why_creation_fails([pod_event("FailedAttachVolume", shared)])

    assert failure is not None
    assert failure[0] == Reason.VOLUME_UNAVAILABLE
    assert failure[1].startswith(f"FailedAttachVolume on node node-1: {shared} (a ReadWriteOnce claim")
    assert "maxSurge: 0" in failure[1]


def test_nothing_failed_where_no_event_says_so() -> None:
    assert why_creation_fails([]) is None
    assert why_creation_fails([pod_event("Scheduled"), pod_event("Pulling")]) is None


def test_a_failure_that_was_overcome_is_no_cause_and_a_newer_one_is() -> None:
    pulling = pod_event("Pulling", at=LATER)
    assert why_creation_fails([pod_event("FailedMount", NO_FOLDER), pulling]) is None
    assert why_creation_fails([pod_event("FailedMount", NO_FOLDER, LATER), pulling]) is None
    newer = pod_event("FailedMount", NO_FOLDER, "2026-11-20T10:02:01Z")
    assert why_creation_fails([newer, pulling]) is not None


def test_the_cause_is_told_rather_than_the_kubelets_later_summary() -> None:
    events = [pod_event("FailedMount", NO_FOLDER), pod_event("FailedMount", SUMMARY, LATER)]
    failure = why_creation_fails(events)
    assert failure is not None
    assert failure[0] is Reason.MODEL_NOT_FOUND


def test_an_event_of_a_reporter_with_finer_times_is_in_order() -> None:
    scheduled = {**pod_event("Scheduled"), "lastTimestamp": None, "eventTime": "2026-11-20T10:00:00.900000Z"}
    assert why_creation_fails([pod_event("FailedMount", NO_FOLDER), scheduled]) is not None


def test_only_pods_whose_containers_are_being_made_are_asked_and_few_of_a_role() -> None:
    pods = [pod("ready"), pod("loading", ready=False), creating("leaving", leaving=True)]
    engines, routers = [creating(f"e{n}") for n in range(9)], [creating("r", "router")]
    assert pods_to_ask(pods) == []
    asked = [each["metadata"]["name"] for each in pods_to_ask([*pods, *engines, *routers])]
    assert asked == ["e0", "e1", "e2", "r"]


@pytest.mark.parametrize(
    ("now", "seconds"), [(NOW, 3.0), ("2026-11-20T10:00:20Z", 10.0), ("2026-11-20T11:00:00Z", 15.0)]
)
def test_a_pod_that_waits_longer_is_looked_at_less_often(now: str, seconds: float) -> None:
    assert look_again_seconds([creating("e"), pod("ready")], now) == seconds


def test_nothing_is_looked_at_again_where_no_pod_is_being_made() -> None:
    assert look_again_seconds([pod("ready"), pod("loading", ready=False)], LATER) is None
