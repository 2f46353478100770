"""Performing a plan: order, refusals, and an API server that is gone."""

import asyncio

import pytest

from kvasir_operator.apply import Applied, apply_plan
from kvasir_operator.errors import KubeForbiddenError, KubeUnavailableError, ObjectRefusedError
from kvasir_operator.kinds import object_key
from kvasir_operator.plan import Apply, Cause, Delete, Plan

from .cluster_objects import child, stored
from .memory_kube import MemoryKube

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
    assert kube.writes == [(verb, "ConfigMap a"), (verb, "ConfigMap b"), ("delete", "ConfigMap c")]
    assert [obj["metadata"]["resourceVersion"] for obj in applied.written] == ["1", "2"]


def test_a_refused_child_does_not_hold_up_the_others() -> None:
    kube = MemoryKube()
    kube.failures = [KubeForbiddenError("exceeded quota")]
    applied = perform(kube)
    assert [str(refusal.key) for refusal in applied.refusals] == ["ConfigMap a"]
    assert [name for _, name in kube.writes] == ["ConfigMap b", "ConfigMap c"]


def test_an_api_server_that_does_not_answer_ends_the_pass() -> None:
    kube = MemoryKube()
    kube.failures = [None, KubeUnavailableError("down")]
    with pytest.raises(KubeUnavailableError):
        perform(kube)
    assert [name for _, name in kube.writes] == ["ConfigMap a"]


def test_replicas_are_handed_over_before_they_are_no_longer_applied() -> None:
    kube = MemoryKube()
    obj = child("Deployment", "d", spec={})
    perform(kube, Plan(applies=(Apply(obj, Cause.CHANGED, kept_replicas=5),)))
    assert [verb for verb, _ in kube.writes] == ["apply by kvasir-operator-scaling", "apply by kvasir-operator"]


def test_a_child_that_cannot_be_changed_into_what_is_wanted_is_made_anew() -> None:
    kube = MemoryKube()
    kube.failures = [ObjectRefusedError("roleRef is immutable")]
    applied = perform(kube, Plan(applies=(Apply(A, Cause.CHANGED, live_uid="u"),)))
    assert kube.writes == [("delete", "ConfigMap a"), ("apply by kvasir-operator", "ConfigMap a")]
    assert applied.refusals == ()


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
