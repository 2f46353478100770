"""Which changes are told as Kubernetes Events."""

from typing import Any

from kvasir_operator.api.conditions import Condition, ConditionType, Reason, carry_over
from kvasir_operator.events import ServiceEvent, notable_changes
from kvasir_operator.kinds import object_key
from kvasir_operator.plan import Apply, Cause, Delete, Plan

from .cluster_objects import NOW, child


def status(ready: bool = True, degraded: Reason | None = None, revision: str = "aaaa") -> dict[str, Any]:
    conditions = [
        Condition(ConditionType.READY, ready, Reason.ALL_ROLES_READY if ready else Reason.LOADING_MODEL, "m"),
        Condition(ConditionType.DEGRADED, degraded is not None, degraded or Reason.AS_EXPECTED, "why"),
    ]
    roles = [{"role": "serve", "revision": revision}]
    return {"roles": roles, "conditions": carry_over([], conditions, 1, NOW)}


def test_a_pass_that_changes_nothing_tells_nothing() -> None:
    assert notable_changes(status(), status(), Plan()) == []


def test_created_children_are_told_in_one_event() -> None:
    plan = Plan(applies=tuple(Apply(child(name=name), Cause.CREATED) for name in ("a", "b")))
    assert notable_changes(status(), status(), plan) == [
        ServiceEvent("Normal", "Created", "created ConfigMap a, ConfigMap b")
    ]


def test_a_restored_child_is_told_with_what_was_changed_and_an_ordinary_update_is_not() -> None:
    plan = Plan(applies=(Apply(child(name="a"), Cause.DRIFTED, ("data.x",)), Apply(child(name="b"), Cause.CHANGED)))
    (event,) = notable_changes(status(), status(), plan)
    assert (event.reason, event.message) == ("Restored", "put back what others changed in ConfigMap a: data.x")


def test_deleted_children_are_told() -> None:
    (event,) = notable_changes(status(), status(), Plan(deletes=(Delete(object_key(child(name="a")), "u"),)))
    assert (event.reason, event.message) == ("Deleted", "deleted ConfigMap a")


def test_a_new_revision_is_told_but_not_the_first() -> None:
    (event,) = notable_changes(status(revision="a"), status(revision="b"), Plan())
    assert event == ServiceEvent("Normal", "RevisionRolled", "role serve goes from revision a to b")
    assert notable_changes({}, status(ready=False), Plan()) == []


def test_becoming_ready_and_ceasing_to_be_are_told_once() -> None:
    assert [event.reason for event in notable_changes(status(False), status(True), Plan())] == ["Ready"]
    assert [event.reason for event in notable_changes(status(True), status(False), Plan())] == ["NotReady"]
    assert notable_changes(status(False), status(False), Plan()) == []


def test_degradation_its_change_of_reason_and_recovery_are_told() -> None:
    quota, crash = status(degraded=Reason.QUOTA_EXCEEDED), status(degraded=Reason.CRASH_LOOPING)
    assert notable_changes(status(), quota, Plan()) == [ServiceEvent("Warning", "QuotaExceeded", "why")]
    assert [event.reason for event in notable_changes(quota, crash, Plan())] == ["CrashLooping"]
    assert notable_changes(crash, crash, Plan()) == []
    assert notable_changes(crash, status(), Plan()) == [ServiceEvent("Normal", "Recovered", "no longer CrashLooping")]
