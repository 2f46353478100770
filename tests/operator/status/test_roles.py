"""What one role's Deployments and pods come to."""

from tests.operator.cluster_objects import (
    KubeObject,
    deployment,
    leader_worker_set,
    member,
    pod,
    pod_event,
    stateful_set,
    waiting_container,
)
from tests.operator.status.service_under_test import of_revision

from kvasir_operator.api.conditions import Reason
from kvasir_operator.status.roles import idle_role, role_state

STUCK = pod("old", ready=False, containerStatuses=[waiting_container("ErrImagePull", "no such image")])


def test_pods_are_counted_over_the_revisions_of_a_role_and_no_other() -> None:
    pods = [of_revision(pod("e1"), "aaaa"), of_revision(pod("e2"), "bbbb"), pod("e3", leaving=True), pod("r", "router")]
    state = role_state([deployment(replicas=1, revision="bbbb"), deployment(replicas=1, revision="aaaa")], 2, pods)
    assert (state.role, state.desired, state.ready, state.draining, state.revision) == ("serve", 2, 2, 1, "bbbb")
    assert (state.num_replicas, state.num_former) == (2, 1)
    assert not state.is_settled


def test_former_revisions_kept_at_zero_do_not_hold_a_role_up() -> None:
    state = role_state([deployment(revision="bbbb"), deployment(replicas=0)], 2, [pod("e1"), pod("e2")])
    assert state.is_settled
    assert state.waiting is None


def test_a_role_with_pods_of_another_number_than_is_wanted_is_not_settled() -> None:
    assert not role_state([deployment(replicas=1)], 2, [pod("e1")]).is_settled
    assert not role_state([deployment(replicas=3)], 2, [pod(f"e{number}") for number in range(3)]).is_settled


def test_what_a_former_revisions_pod_lacked_is_over_once_it_has_a_successor() -> None:
    stuck, successor = of_revision(STUCK, "aaaa"), of_revision(pod("new", ready=False), "bbbb")
    mended = deployment(replicas=1, total=2, updated=1, revision="bbbb")
    alone, followed = role_state([mended], 1, [stuck]), role_state([mended], 1, [stuck, successor])
    assert alone.waiting is not None
    assert alone.waiting.reason is Reason.IMAGE_PULL_FAILED
    assert followed.waiting is not None
    assert followed.waiting.reason is Reason.LOADING_MODEL


def test_the_worst_of_what_pods_wait_for_is_shown() -> None:
    pods = [pod("e1", ready=False), STUCK, pod("e2", ready=False)]
    waiting = role_state([deployment(replicas=3)], 3, pods).waiting
    assert waiting is not None
    assert waiting.reason is Reason.IMAGE_PULL_FAILED


def test_events_of_a_pod_say_what_its_status_does_not() -> None:
    creating = pod("e", ready=False, containerStatuses=[waiting_container("ContainerCreating")])
    events = {"e": [pod_event("FailedMount", 'secret "keys" not found')]}
    waiting = role_state([deployment()], 2, [creating], events).waiting
    assert waiting is not None
    assert waiting.reason is Reason.SECRET_NOT_FOUND


def test_a_group_is_one_replica_however_many_pods_it_has() -> None:
    sets = [stateful_set(0), stateful_set(1)]
    pods = [member(rank, each) for each in sets for rank in (0, 1)]
    state = role_state(sets, 2, pods)
    assert (state.desired, state.ready, state.num_replicas, state.draining) == (2, 2, 2, 0)
    assert state.is_settled
    assert state.waiting is None


def test_a_group_is_not_ready_before_its_first_pod_is_and_says_what_that_waits_for() -> None:
    group = stateful_set()
    state = role_state([group], 1, [member(0, group, ready=False), member(1, group)])
    assert state.ready == 0
    assert state.waiting is not None
    assert state.waiting.reason is Reason.LOADING_MODEL


def test_a_group_that_has_not_all_of_its_pods_is_not_settled() -> None:
    group = stateful_set()
    group["status"]["replicas"] = 1
    state = role_state([group], 1, [member(0, group)])
    assert not state.is_settled


def test_groups_that_are_to_be_made_are_waited_for() -> None:
    group = stateful_set()
    waiting = role_state([group], 2, []).waiting
    assert waiting is not None
    assert waiting.message == "StatefulSet llama-serve-aaaa-0: 0 of 2 groups of pods made"


def test_a_role_of_groups_at_zero_has_no_workload_and_is_at_rest_all_the_same() -> None:
    at_rest, waits = idle_role("serve", 0, "aaaa", []), idle_role("serve", 1, "aaaa", [])
    assert at_rest.is_settled
    assert at_rest.waiting is None
    assert (waits.is_settled, waits.waiting is not None) == (False, True)


def test_pods_of_groups_that_are_gone_are_still_draining() -> None:
    group = stateful_set()
    assert idle_role("serve", 0, "aaaa", [member(0, group, leaving=True), member(1, group, leaving=True)]).draining == 1


def test_a_leader_worker_set_is_one_replica_whatever_generation_its_status_names() -> None:
    group = leader_worker_set()
    state = role_state([group], 1, [member(0, group), member(1, group)])
    assert (state.num_replicas, state.is_settled, state.waiting) == (1, True, None)
    group["status"]["observedGeneration"] = 0
    assert not role_state([group], 1, [member(0, group), member(1, group)]).is_settled


def test_one_that_nobody_looks_after_says_who_should() -> None:
    group = leader_worker_set()
    del group["status"]
    state = role_state([group], 1, [])
    assert not state.is_settled
    assert state.waiting is not None
    assert state.waiting.message == (
        "LeaderWorkerSet llama-serve-aaaa-0: 0 of 1 groups of pods made; the controller of LeaderWorkerSets makes "
        "them, if it runs"
    )


def evicted(name: str, at: str) -> KubeObject:
    found = pod(name, ready=False, phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    found["metadata"]["creationTimestamp"] = at
    return found


def test_how_pods_before_one_that_loads_have_ended_is_named_with_their_number() -> None:
    ended = [evicted(f"e{minute}", f"2026-11-20T09:0{minute}:00Z") for minute in (1, 3, 2)]
    state = role_state([deployment(replicas=1)], 1, [*ended, pod("e4", ready=False)])
    assert state.waiting is not None
    assert state.waiting.reason is Reason.POD_FAILED
    said = "pod e3 ended, as did 2 before it: Evicted: The node was low on resource: memory."
    assert state.waiting.message == said


def test_an_end_is_over_once_a_later_pod_is_ready() -> None:
    ended = evicted("e1", "2026-11-20T09:00:00Z")
    state = role_state([deployment()], 2, [ended, pod("e2"), pod("e3", ready=False)])
    assert state.waiting is not None
    assert state.waiting.reason is Reason.LOADING_MODEL
