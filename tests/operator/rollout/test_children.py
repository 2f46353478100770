"""Which children of former revisions are scaled, and which nobody may delete yet."""

from dataclasses import replace

import pytest
from tests.operator.cluster_objects import child, deployment, leader_worker_set, stateful_set, stored

from kvasir_operator.api.labels import ROLE_LABEL
from kvasir_operator.apply.plan import Edit
from kvasir_operator.kube.kinds import DEPLOYMENT, SERVICE, STATEFUL_SET, KubeObject, object_key
from kvasir_operator.rollout.children import kept_children, kept_router, scales, weight_removals
from kvasir_operator.rollout.goal import RolloutPhase
from kvasir_operator.rollout.observed import ObservedWorkload
from kvasir_operator.rollout.plan import RolloutPlan
from kvasir_operator.rollout.workload import Workload, WorkloadKey


def workload(revision: str, replicas: int = 0, num_leaving: int = 0) -> ObservedWorkload:
    obj = stored(
        deployment(replicas=replicas, revision=revision), uid=f"uid-{revision}", name=f"llama-serve-{revision}"
    )
    return ObservedWorkload(Workload(key(revision), 1, replicas, num_leaving=num_leaving), (obj,), ())


def key(revision: str) -> WorkloadKey:
    return WorkloadKey("serve", revision)


def plan(replicas: dict[str, int], *expired: str) -> RolloutPlan:
    """With `new` as the current revision."""
    by_key = {key(revision): number for revision, number in replicas.items()}
    return RolloutPlan(RolloutPhase.PROGRESSING, "new", number=2, replicas=by_key, expired=frozenset(map(key, expired)))


def names(found: frozenset[tuple[object, str]]) -> dict[str, list[str]]:
    return {kind.kind: sorted(name for each, name in found if each == kind) for kind in (DEPLOYMENT, SERVICE)}


def test_former_workloads_are_scaled_and_those_that_shrink_come_first() -> None:
    former = [workload("up", 1), workload("down", 3), workload("same", 2), workload("new", 1)]
    found = scales(plan({"up": 2, "down": 1, "same": 2, "new": 4}), former)
    assert found == (Edit.scale(former[1].objects[0], 1), Edit.scale(former[0].objects[0], 2))
    assert found[0].patch["metadata"] == {"uid": "uid-down", "resourceVersion": "7"}


def test_deployments_stay_until_they_expire_and_services_while_there_are_pods() -> None:
    former = [workload("serving", 1), workload("leaving", num_leaving=1), workload("kept"), workload("past")]
    found = kept_children(plan({}, "past"), former)
    assert names(found) == {
        "Deployment": ["llama-serve-kept", "llama-serve-leaving", "llama-serve-serving"],
        "Service": ["llama-serve-leaving", "llama-serve-serving"],
    }


@pytest.mark.parametrize(
    ("left", "num_unbound", "num_leaving", "is_kept"),
    [(0, 2, 0, False), (1, 2, 0, True), (0, 1, 0, True), (0, 2, 1, True), (None, 2, 0, True)],
)
def test_the_service_of_pods_that_no_node_has_goes_with_them(
    left: int | None, num_unbound: int, num_leaving: int, is_kept: bool
) -> None:
    former = workload("past", 2)
    seen = replace(former.workload, num_pods=2, num_unbound=num_unbound, num_leaving=num_leaving)
    found = kept_children(plan({} if left is None else {"past": left}), [replace(former, workload=seen)])
    assert names(found) == {"Deployment": ["llama-serve-past"], "Service": ["llama-serve-past"] if is_kept else []}


def test_the_weight_of_a_canary_that_was_given_up_is_taken_off_while_it_has_pods() -> None:
    weights = {"canary": 50, "served": None, "without_its_weight": 0, "new": 10}
    former = [workload(revision, 1) for revision in weights] + [workload("idle")]
    workloads = [
        replace(each, workload=replace(each.workload, traffic_weight=weights.get(each.workload.key.revision, 50)))
        for each in former
    ]
    services = [stored(child("Service", each.service_name)) for each in workloads]
    found = weight_removals(plan({}), workloads, [*services, *(each.objects[0] for each in workloads)])
    assert found == (Edit.without_weight(services[0]),)


def of_router(kind: str, name: str = "llama-router", role: str = "router") -> KubeObject:
    obj = child(kind, name)
    obj["metadata"]["labels"][ROLE_LABEL] = role
    return obj


@pytest.mark.parametrize(
    ("is_replaced", "phase", "is_kept"),
    [
        (True, RolloutPhase.COMPLETE, False),
        (False, RolloutPhase.COMPLETE, True),
        (True, RolloutPhase.PROGRESSING, True),
        (True, RolloutPhase.HALTED, True),
    ],
)
def test_a_router_stays_until_the_gateway_serves_and_every_engine_believes_it(
    is_replaced: bool, phase: RolloutPhase, is_kept: bool
) -> None:
    rollout = replace(plan({}), phase=phase)
    children = [of_router(kind) for kind in ("Deployment", "Service", "ServiceAccount")]
    engine, bare = of_router("Service", "llama-serve", "serve"), child("Service", "theirs")
    del bare["metadata"]["labels"]
    kept = kept_router(rollout, [*children, engine, bare], is_replaced=is_replaced)
    assert kept == (frozenset(map(object_key, children)) if is_kept else frozenset())


FORMER = [("down", 0), ("down", 1), ("up", 0)]


def of_groups(revision: str, running: int, idle: int = 0) -> ObservedWorkload:
    sets = [stateful_set(index, revision, is_running=index < running) for index in range(running + idle)]
    return ObservedWorkload(Workload(key(revision), 1, running), tuple(sets), ())


def test_groups_of_a_former_revision_are_scaled_to_none_or_to_all_of_their_pods() -> None:
    shrinking, growing = of_groups("down", 2), of_groups("up", 1, idle=2)
    going = {key("down"): frozenset({"llama-serve-down-0"})}
    found = scales(plan({"down": 1, "up": 2}), [shrinking, growing], going)
    assert [(each.key.name, each.patch["spec"]["replicas"]) for each in found] == [
        ("llama-serve-down-0", 0),
        ("llama-serve-up-1", 2),
    ]


def test_a_former_revision_has_no_more_groups_than_it_had() -> None:
    assert scales(plan({"up": 5}), [of_groups("up", 1)]) == ()


def test_groups_of_a_former_revision_stay_and_with_them_the_service_by_which_they_find_one_another() -> None:
    found = kept_children(plan({}, "past"), [of_groups("kept", 0, idle=1), of_groups("serving", 1)])
    assert {str(each) for each in found} == {
        "StatefulSet llama-serve-kept-0",
        "StatefulSet llama-serve-serving-0",
        "Service llama-serve-serving",
        "Service llama-serve-ranks",
    }


def test_a_group_of_the_current_revision_that_is_not_wanted_is_not_kept() -> None:
    found = kept_children(plan({"new": 1}), [of_groups("new", 2)])
    assert not [each for each in found if each.kind == STATEFUL_SET]


def test_a_leader_worker_set_of_a_former_revision_is_scaled_to_none_or_to_its_one_group() -> None:
    sets = [leader_worker_set(index, revision, is_running=revision == "down") for revision, index in FORMER]
    workloads = [ObservedWorkload(Workload(key("down"), 1, 2), tuple(sets[:2]), ())]
    workloads.append(ObservedWorkload(Workload(key("up"), 1, 0), tuple(sets[2:]), ()))
    found = scales(plan({"down": 1, "up": 1}), workloads, {key("down"): frozenset({"llama-serve-down-0"})})
    assert [(str(each.key), each.patch["spec"]["replicas"]) for each in found] == [
        ("LeaderWorkerSet llama-serve-down-0", 0),
        ("LeaderWorkerSet llama-serve-up-0", 1),
    ]
