"""Which changes are reported as Kubernetes Events."""

from typing import Any

from tests.operator.cluster_objects import NOW, child, stateful_set

from kvasir_operator.api.conditions import Condition, ConditionType, Reason, carry_over
from kvasir_operator.apply.plan import Apply, Cause, Delete, Plan, Restart
from kvasir_operator.kube.kinds import object_key
from kvasir_operator.status.events import ServiceEvent, notable_changes


def ready_reason(ready: bool | Reason) -> Reason:
    if isinstance(ready, Reason):
        return ready
    return Reason.SERVING if ready else Reason.LOADING_MODEL


def status(
    ready: bool | Reason = True,
    degraded: Reason | None = None,
    revision: str = "aaaa",
    progressing: Reason = Reason.ROLLOUT_COMPLETE,
) -> dict[str, Any]:
    conditions = [
        Condition(ConditionType.READY, ready is not False, ready_reason(ready), "m"),
        Condition(ConditionType.PROGRESSING, False, progressing, "p"),
        Condition(ConditionType.DEGRADED, degraded is not None, degraded or Reason.AS_EXPECTED, "why"),
    ]
    roles = [{"role": "serve", "revision": revision}]
    return {"roles": roles, "conditions": carry_over([], conditions, 1, NOW)}


def test_a_pass_that_changes_nothing_reports_nothing() -> None:
    assert notable_changes(status(), status(), Plan()) == []


def test_created_children_are_reported_in_one_event() -> None:
    plan = Plan(applies=tuple(Apply(child(name=name), Cause.CREATED) for name in ("a", "b")))
    assert notable_changes(status(), status(), plan) == [
        ServiceEvent("Normal", "Created", "created ServiceAccount a, ServiceAccount b")
    ]


def test_a_restored_child_is_reported_with_what_was_changed_and_an_ordinary_update_is_not() -> None:
    plan = Plan(applies=(Apply(child(name="a"), Cause.DRIFTED, ("data.x",)), Apply(child(name="b"), Cause.CHANGED)))
    (event,) = notable_changes(status(), status(), plan)
    assert (event.reason, event.message) == ("Restored", "put back what others changed in ServiceAccount a: data.x")


def test_deleted_children_are_reported() -> None:
    (event,) = notable_changes(status(), status(), Plan(deletes=(Delete(object_key(child(name="a")), "u"),)))
    assert (event.reason, event.message) == ("Deleted", "deleted ServiceAccount a")


def test_a_new_revision_is_reported_but_not_the_first() -> None:
    (event,) = notable_changes(status(revision="a"), status(revision="b"), Plan())
    assert event == ServiceEvent("Normal", "RevisionRolled", "role serve goes from revision a to b")
    assert notable_changes({}, status(ready=False), Plan()) == []


def test_becoming_ready_and_ceasing_to_be_are_reported_once() -> None:
    assert [event.reason for event in notable_changes(status(False), status(True), Plan())] == ["Ready"]
    assert [event.reason for event in notable_changes(status(True), status(False), Plan())] == ["NotReady"]
    assert notable_changes(status(False), status(False), Plan()) == []


def test_going_idle_and_waking_are_reported_and_a_suspension_is_no_warning() -> None:
    idle, suspended = status(Reason.IDLE), status(False)
    suspended["conditions"][0]["reason"] = "Suspended"
    assert notable_changes(status(), idle, Plan()) == [ServiceEvent("Normal", "Idle", "m")]
    assert notable_changes(idle, status(), Plan()) == [ServiceEvent("Normal", "Ready", "m")]
    assert notable_changes(idle, idle, Plan()) == []
    assert notable_changes(status(), suspended, Plan()) == [ServiceEvent("Normal", "NotReady", "Suspended: m")]


def test_a_canary_that_waits_for_somebody_is_reported_once() -> None:
    paused = status(progressing=Reason.ROLLOUT_PAUSED)
    assert notable_changes(status(), paused, Plan()) == [ServiceEvent("Normal", "RolloutPaused", "p")]
    assert notable_changes(paused, paused, Plan()) == []


def test_degradation_its_change_of_reason_and_recovery_are_reported() -> None:
    quota, crash = status(degraded=Reason.QUOTA_EXCEEDED), status(degraded=Reason.CRASH_LOOPING)
    assert notable_changes(status(), quota, Plan()) == [ServiceEvent("Warning", "QuotaExceeded", "why")]
    assert [event.reason for event in notable_changes(quota, crash, Plan())] == ["CrashLooping"]
    assert notable_changes(crash, crash, Plan()) == []
    assert notable_changes(crash, status(), Plan()) == [ServiceEvent("Normal", "Recovered", "no longer CrashLooping")]


def test_a_group_that_is_made_anew_is_reported_as_a_failure_only_where_one_is_recorded() -> None:
    key = object_key(stateful_set())
    restarts = (Restart(key, "u", (), "it failed", {"a": "b"}), Restart(key, "u", (), "pod p was told to go"))
    message = "StatefulSet llama-serve-aaaa-0: its pods are made anew: "
    assert notable_changes(status(), status(), Plan(restarts=restarts)) == [
        ServiceEvent("Warning", "GroupRestarted", f"{message}it failed"),
        ServiceEvent("Normal", "GroupRestarted", f"{message}pod p was told to go"),
    ]
