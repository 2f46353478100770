"""What the operator decides to write, given what it wants and what is there."""

from typing import Any

import pytest
from tests.operator.cluster_objects import child, owner, service, stored

from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL
from kvasir_operator.apply.plan import (
    Apply,
    Cause,
    Delete,
    Edit,
    Plan,
    Restart,
    make_plan,
    stamped,
)
from kvasir_operator.kube.kinds import object_key


def plan_for(desired: list[dict[str, Any]], observed: list[dict[str, Any]]) -> Plan:
    return make_plan([stamped(obj) for obj in desired], observed, service())


def test_creates_what_is_missing_pods_last() -> None:
    plan = plan_for([child("Deployment", "d"), child("Service", "s"), child("ServiceAccount", "a")], [])
    assert [(action.obj["kind"], action.cause) for action in plan.applies] == [
        ("ServiceAccount", Cause.CREATED),
        ("Service", Cause.CREATED),
        ("Deployment", Cause.CREATED),
    ]


def test_writes_nothing_when_all_is_as_wanted() -> None:
    wanted = child(data={"a": "1"})
    live = stored(stamped(wanted))
    assert plan_for([wanted], [{**live, "data": {"a": "1", "theirs": "2"}}]) == Plan()


def test_applies_again_when_a_field_is_no_longer_wanted() -> None:
    live = stored(stamped(child(data={"a": "1", "b": "2"})))
    (action,) = plan_for([child(data={"a": "1"})], [live]).applies
    assert action.cause is Cause.CHANGED


def test_puts_back_a_field_that_somebody_changed() -> None:
    wanted = child(data={"a": "1"})
    live = {**stored(stamped(wanted)), "data": {"a": "hacked"}}
    (action,) = plan_for([wanted], [live]).applies
    assert action == Apply(stamped(wanted), Cause.DRIFTED, ("data.a",), live_uid="child-uid")


def test_deletes_own_children_that_are_no_longer_wanted() -> None:
    (deletion,) = plan_for([], [stored(child(), uid="u")]).deletes
    assert (deletion.key, deletion.uid) == (object_key(child()), "u")


def test_what_is_kept_stays_although_nothing_desires_it() -> None:
    kept, unwanted = stored(child(name="kept")), stored(child(name="unwanted"))
    plan = make_plan([], [kept, unwanted], service(), kept=[object_key(kept)])
    assert [deletion.key.name for deletion in plan.deletes] == ["unwanted"]


def test_never_deletes_what_it_does_not_own() -> None:
    foreign = stored(child(), ownerReferences=[])
    leaving = stored(child(name="b"), deletionTimestamp="2026-11-20T10:00:00Z")
    assert plan_for([], [foreign, leaving]) == Plan()


def test_leaves_an_object_of_somebody_else_alone_and_says_so() -> None:
    theirs = stored(child(), ownerReferences=[{**owner(), "kind": "Tenant", "name": "them", "uid": "x"}])
    unlabelled = stored(child(name="b"), ownerReferences=[], labels={})
    plan = plan_for([child(), child(name="b")], [theirs, unlabelled])
    assert plan == Plan(blocked=(object_key(child()), object_key(child(name="b"))))


def test_waits_for_the_children_of_a_deleted_service_of_the_same_name() -> None:
    plan = plan_for([child()], [stored(child(), ownerReferences=[owner(uid="earlier")])])
    assert plan == Plan(terminating=(object_key(child()),))


def test_another_services_child_of_the_same_name_is_not_waited_for() -> None:
    plan = plan_for([child()], [stored(child(), ownerReferences=[owner("other", "other-uid")])])
    assert plan == Plan(blocked=(object_key(child()),))


def test_adopts_a_child_that_was_orphaned() -> None:
    (action,) = plan_for([child()], [stored(child(), ownerReferences=[])]).applies
    assert action.cause is Cause.CHANGED


def test_adopts_what_is_not_rendered_and_an_operator_has_made() -> None:
    former, users = stored(stamped(child(name="former"))), stored(child(name="users"))
    orphans = [{**each, "metadata": {**each["metadata"], "ownerReferences": []}} for each in (former, users)]
    plan = plan_for([child()], [stored(stamped(child())), *orphans])
    assert plan == Plan(edits=(Edit.adoption(orphans[0], owner()),))


def test_a_plan_can_do_without_some_children() -> None:
    scale = Edit.scale(stored(child("Deployment", "d")), 1)
    desired = [stamped(child(name=name)) for name in ("a", "b")]
    removal = Edit.without_weight(stored(child("Service", "s")))
    plan = make_plan(desired, [stored(child(name="c"))], service(), (scale, removal))
    assert plan.edits == (scale, removal)
    left = plan.without([object_key(child(name="a")), object_key(child(name="c")), scale.key, removal.key])
    assert [action.key.name for action in left.applies] == ["b"]
    assert (left.edits, left.deletes) == ((), ())


def test_replicas_that_an_autoscaler_set_are_no_drift() -> None:
    wanted = child("Deployment", spec={"strategy": {"type": "Recreate"}})
    live = stored(stamped(wanted))
    assert plan_for([wanted], [{**live, "spec": {**live["spec"], "replicas": 7}}]) == Plan()


def of_workload(kind: str, revision: str | None = "aaaa") -> dict[str, Any]:
    """A role's Deployment or its Service; None has that of all revisions, a router's."""
    obj = child(kind, f"llama-{revision}")
    obj["metadata"]["labels"] |= {ROLE_LABEL: "serve"} | ({} if revision is None else {REVISION_LABEL: revision})
    return obj


def kinds_in_turn(*applies: Apply) -> list[list[str]]:
    return [[each.key.kind.kind for each in turn.applies] for turn in Plan(applies).in_turns()]


def test_a_new_workload_comes_before_its_service() -> None:
    made = [Apply(of_workload(kind), Cause.CREATED) for kind in ("ServiceAccount", "Service", "Deployment")]
    assert kinds_in_turn(*made) == [["ServiceAccount", "Deployment"], ["Service"]]


@pytest.mark.parametrize(
    ("service", "workload"),
    [
        (Apply(of_workload("Service", "bbbb"), Cause.CREATED), Apply(of_workload("Deployment"), Cause.CREATED)),
        (Apply(of_workload("Service", None), Cause.CREATED), Apply(of_workload("Deployment", None), Cause.CREATED)),
        (Apply(of_workload("Service"), Cause.CHANGED), Apply(of_workload("Deployment"), Cause.CREATED)),
        (Apply(of_workload("Service"), Cause.CREATED), Apply(of_workload("Deployment"), Cause.CHANGED)),
    ],
    ids=["of another revision", "of no revision", "that is there", "whose workload is there"],
)
def test_no_other_service_waits(service: Apply, workload: Apply) -> None:
    assert kinds_in_turn(service, workload) == [["Service", "Deployment"], []]


def test_former_workloads_shrink_and_children_go_after_what_is_made() -> None:
    live = stored(of_workload("Deployment", "bbbb"))
    made, scale = Apply(of_workload("Deployment"), Cause.CREATED), Edit.scale(live, 0)
    restart, deletion = Restart(object_key(live), "u", (), "Cause"), Delete(object_key(live), "u")
    plan = Plan((made,), (scale,), (restart,), (deletion,), (object_key(live),), (object_key(live),))
    first, then = plan.in_turns()
    assert first == Plan((made,), blocked=plan.blocked, terminating=plan.terminating)
    assert then == Plan((), (scale,), (restart,), (deletion,))
