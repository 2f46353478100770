"""Performing a plan: order, refusals, and an API server that is gone."""

import asyncio
from dataclasses import replace

import pytest
from tests.operator.cluster_objects import child, stateful_set, stored
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import SERVICE_LABEL, TRAFFIC_WEIGHT
from kvasir_operator.apply.apply import Applied, apply_plan
from kvasir_operator.apply.plan import Apply, Cause, Delete, Edit, Plan, PodDeletion, Restart, stamped
from kvasir_operator.errors import (
    AdmissionFailedError,
    KubeApiError,
    KubeForbiddenError,
    KubeUnavailableError,
    ObjectRefusedError,
    ServerFailedError,
)
from kvasir_operator.groups.record import RESTARTS
from kvasir_operator.kube.kinds import KubeObject, object_key

A, B = child(name="a"), child(name="b")
PLAN = Plan(
    applies=(Apply(A, Cause.CREATED), Apply(B, Cause.CREATED)), deletes=(Delete(object_key(child(name="c")), "u"),)
)


def perform(kube: MemoryKube, plan: Plan = PLAN) -> Applied:
    return asyncio.run(apply_plan(kube, "models", plan))


def test_applies_in_order_then_deletes() -> None:
    kube = MemoryKube()
    applied = perform(kube)
    verb = "apply by kvasir-operator"
    assert kube.writes == [(verb, "ServiceAccount a"), (verb, "ServiceAccount b"), ("delete", "ServiceAccount c")]
    assert [obj["metadata"]["resourceVersion"] for obj in applied.written] == ["1", "2"]


def test_a_refused_child_does_not_hold_up_the_others() -> None:
    kube = MemoryKube()
    kube.failures = [KubeForbiddenError("exceeded quota")]
    applied = perform(kube)
    assert [str(refusal.key) for refusal in applied.refusals] == ["ServiceAccount a"]
    assert [name for _, name in kube.writes] == ["ServiceAccount b", "ServiceAccount c"]


def test_an_api_server_that_does_not_answer_ends_the_pass() -> None:
    kube = MemoryKube()
    kube.failures = [None, KubeUnavailableError("down")]
    with pytest.raises(KubeUnavailableError):
        perform(kube)
    assert [name for _, name in kube.writes] == ["ServiceAccount a"]


def test_one_child_that_is_to_be_tried_again_later_holds_up_no_other() -> None:
    kube = MemoryKube()
    kube.failures = [KubeUnavailableError("storage is (re)initializing", 429)]
    assert [str(refusal.key) for refusal in perform(kube).refusals] == ["ServiceAccount a"]
    assert [name for _, name in kube.writes] == ["ServiceAccount b", "ServiceAccount c"]


def test_an_api_server_that_asks_to_be_left_alone_is() -> None:
    kube = MemoryKube()
    kube.failures = [KubeUnavailableError("too many requests", 429)] * 3
    with pytest.raises(KubeUnavailableError):
        perform(kube)
    assert len(kube.failures) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AdmissionFailedError('failed calling webhook "w.example.com"', 500), Reason.ADMISSION_FAILED),
        (KubeForbiddenError("exceeded quota: gpus"), Reason.QUOTA_EXCEEDED),
        (KubeForbiddenError("may not"), Reason.APPLY_FAILED),
        (ServerFailedError("failed to create typed patch object: field not declared", 500), Reason.APPLY_FAILED),
    ],
)
def test_a_refusal_has_its_reason_and_holds_up_no_other_child(error: KubeApiError, reason: Reason) -> None:
    kube = MemoryKube()
    kube.failures = [error]
    applied = perform(kube)
    assert [refusal.reason for refusal in applied.refusals] == [reason]
    assert len(kube.writes) == 2


def test_a_child_that_a_webhook_denies_is_not_deleted_to_be_made_anew() -> None:
    kube = MemoryKube()
    kube.failures = [AdmissionFailedError('admission webhook "w.example.com" denied the request', 400)]
    perform(kube, Plan(applies=(Apply(A, Cause.CHANGED, live_uid="u"),)))
    assert kube.writes == []


def scale(kube: MemoryKube, **seen: str) -> Applied:
    """To 1, of a Deployment with 3 replicas of which `seen` is what the pass read."""
    obj = stored(child("Deployment", "d", spec={"replicas": 3}))
    kube.objects[("Deployment", "models", "d")] = obj
    read = {**obj, "metadata": {**obj["metadata"], **seen}}
    return perform(kube, Plan(edits=(Edit.scale(read, 1),)))


def test_a_former_workload_is_scaled_and_nothing_else_of_it_is_written() -> None:
    kube = MemoryKube()
    applied = scale(kube)
    assert kube.writes == [("patch", "Deployment d")]
    assert [obj["spec"] for obj in applied.written] == [{"replicas": 1}]
    assert applied.stale == ()


@pytest.mark.parametrize("seen", [{"resourceVersion": "6"}, {"uid": "another"}])
def test_a_workload_that_has_changed_since_it_was_seen_is_not_scaled(seen: dict[str, str]) -> None:
    kube = MemoryKube()
    applied = scale(kube, **seen)
    assert kube.writes == []
    assert [str(key) for key in applied.stale] == ["Deployment d"]
    assert applied.refusals == ()


def weighed_service() -> KubeObject:
    obj = stamped(child("Service", "s"))
    obj["metadata"]["labels"] |= {TRAFFIC_WEIGHT: "50"}
    obj["metadata"]["annotations"] |= {TRAFFIC_WEIGHT: "50"}
    return stored(obj)


def test_a_weight_is_taken_off_and_what_was_applied_no_longer_counts() -> None:
    kube, live = MemoryKube(), weighed_service()
    kube.objects[("Service", "models", "s")] = live
    applied = perform(kube, Plan(edits=(Edit.without_weight(live),)))
    assert kube.writes == [("patch", "Service s")]
    [left] = applied.written
    assert left["metadata"]["labels"] == {SERVICE_LABEL: "llama"}
    assert left["metadata"]["annotations"] == {}


def test_a_weight_is_left_where_the_service_has_changed_since_it_was_seen() -> None:
    kube, live = MemoryKube(), weighed_service()
    kube.objects[("Service", "models", "s")] = {**live, "metadata": {**live["metadata"], "resourceVersion": "8"}}
    assert [str(key) for key in perform(kube, Plan(edits=(Edit.without_weight(live),))).stale] == ["Service s"]
    assert kube.writes == []


def test_a_workload_that_may_not_be_scaled_does_not_hold_up_what_follows() -> None:
    kube = MemoryKube()
    kube.failures = [KubeForbiddenError("forbidden", 403)]
    assert [str(refusal.key) for refusal in scale(kube).refusals] == ["Deployment d"]


def test_a_child_that_cannot_be_changed_into_what_is_wanted_is_made_anew() -> None:
    kube = MemoryKube()
    kube.failures = [ObjectRefusedError("roleRef is immutable")]
    applied = perform(kube, Plan(applies=(Apply(A, Cause.CHANGED, live_uid="u"),)))
    assert kube.writes == [("delete", "ServiceAccount a"), ("apply by kvasir-operator", "ServiceAccount a")]
    assert applied.refusals == ()


def test_a_child_that_would_be_refused_as_a_new_one_too_is_not_deleted() -> None:
    kube = MemoryKube()
    kube.failures = [ObjectRefusedError("spec.interval: Invalid value", 422)] * 2
    applied = perform(kube, Plan(applies=(Apply(A, Cause.CHANGED, live_uid="u"),)))
    assert [str(refusal.key) for refusal in applied.refusals] == ["ServiceAccount a"]
    assert kube.writes == []


def test_a_secret_is_made_with_a_value_that_nobody_wrote_down() -> None:
    kube = MemoryKube()
    perform(kube, Plan(applies=(Apply(child("Secret", "s"), Cause.CREATED),)))
    assert kube.writes == [("create", "Secret s")]
    assert all(kube.objects[("Secret", "models", "s")]["stringData"].values())


def test_a_secret_that_another_pass_has_just_made_is_left_alone() -> None:
    kube = MemoryKube()
    kube.objects[("Secret", "models", "s")] = stored(child("Secret", "s"))
    applied = perform(kube, Plan(applies=(Apply(child("Secret", "s"), Cause.CREATED),)))
    assert [str(refusal.key) for refusal in applied.refusals] == ["Secret s"]
    assert kube.writes == []


def test_a_deployment_is_never_made_anew_because_its_pods_would_go_with_it() -> None:
    kube = MemoryKube()
    kube.failures = [ObjectRefusedError("selector is immutable")]
    applied = perform(kube, Plan(applies=(Apply(child("Deployment", "d"), Cause.CHANGED, live_uid="u"),)))
    assert [str(refusal.key) for refusal in applied.refusals] == ["Deployment d"]
    assert kube.writes == []


GROUP = stateful_set()
KEY = object_key(GROUP)
MEMBERS = (PodDeletion("p-0", "u0", 5), PodDeletion("p-1", "u1", 5))
RESTART = Restart(KEY, GROUP["metadata"]["uid"], MEMBERS, "it failed", {RESTARTS: "recorded"})


def with_group() -> MemoryKube:
    kube = MemoryKube()
    kube.objects[("StatefulSet", "models", KEY.name)] = GROUP
    return kube


def test_a_restart_is_recorded_before_the_pods_go() -> None:
    kube = with_group()
    assert perform(kube, Plan(restarts=(RESTART,))) == Applied()
    assert kube.writes == [("patch", str(KEY)), ("delete", "Pod p-0"), ("delete", "Pod p-1")]
    annotations = kube.objects[("StatefulSet", "models", KEY.name)]["metadata"]["annotations"]
    assert annotations == {**GROUP["metadata"]["annotations"], RESTARTS: "recorded"}


def test_without_anything_to_record_only_the_pods_go() -> None:
    kube = with_group()
    perform(kube, Plan(restarts=(replace(RESTART, annotations={}),)))
    assert kube.writes == [("delete", "Pod p-0"), ("delete", "Pod p-1")]


def test_a_group_that_is_another_by_now_is_left_alone() -> None:
    kube = with_group()
    assert perform(kube, Plan(restarts=(replace(RESTART, uid="another"),))).stale == (KEY,)
    assert kube.writes == []


def test_a_restart_that_is_refused_does_not_hold_up_others() -> None:
    kube = with_group()
    kube.failures = [KubeForbiddenError("statefulsets is forbidden")]
    plan = Plan(restarts=(RESTART, replace(RESTART, annotations={})))
    assert [refusal.key for refusal in perform(kube, plan).refusals] == [KEY]
    assert kube.writes == [("delete", "Pod p-0"), ("delete", "Pod p-1")]


def test_a_leader_is_deleted_in_the_foreground() -> None:
    kube = with_group()
    perform(kube, Plan(restarts=(replace(RESTART, pods=(replace(MEMBERS[0], is_foreground=True), MEMBERS[1])),)))
    assert kube.writes[1:] == [("delete in the foreground", "Pod p-0"), ("delete", "Pod p-1")]
