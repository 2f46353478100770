"""Rollouts from the first pass to the last: who has how many pods when."""

import math
from dataclasses import replace

import pytest
from tests.operator.rollout.simulated_cluster import SimulatedCluster

from kvasir_operator.api.model import CanarySpec, RolloutSpec
from kvasir_operator.rollout.goal import RolloutPhase
from kvasir_operator.rollout.plan import plan_rollout
from kvasir_operator.rollout.workload import Workload, WorkloadKey

Pods = tuple[int, int]
"""Of prefill and of decode."""


def running(
    desired: dict[str, int] | None = None, spec: RolloutSpec | None = None, revision: str = "a"
) -> SimulatedCluster:
    """A cluster at rest with all pods of revision a."""
    cluster = SimulatedCluster(dict(desired or {"serve": 3}), spec or RolloutSpec(), revision)
    cluster.settle()
    return cluster


def steps(cluster: SimulatedCluster) -> list[dict[str, int]]:
    """Replicas by revision after each pass that changes them, everything catching up in between; of one role."""
    seen = []
    while not cluster.is_at_rest():
        cluster.run_pass()
        seen.append({key.revision: each.replicas for key, each in cluster.deployments.items() if each.replicas})
        cluster.catch_up()
        for key, each in cluster.deployments.items():
            cluster.load(key, len(each.pods))
        cluster.observe()
    return [now for before, now in zip([{}, *seen], seen, strict=False) if now != before]


def replicas(cluster: SimulatedCluster, role: str = "serve") -> dict[str, int]:
    return {key.revision: each.replicas for key, each in cluster.deployments.items() if key.role == role}


def test_one_more_pod_at_a_time_while_none_may_lack() -> None:
    cluster = running()
    cluster.revision = "b"
    assert steps(cluster) == [
        {"a": 3, "b": 1},
        {"a": 2, "b": 1},
        {"a": 2, "b": 2},
        {"a": 1, "b": 2},
        {"a": 1, "b": 3},
        {"b": 3},
    ]


def test_without_surge_an_old_pod_goes_first() -> None:
    cluster = running(spec=RolloutSpec(max_surge=0, max_unavailable=1))
    cluster.revision = "b"
    assert steps(cluster)[:3] == [{"a": 2}, {"a": 2, "b": 1}, {"a": 1, "b": 1}]
    assert replicas(cluster) == {"a": 0, "b": 3}


def test_a_first_revision_gets_all_its_pods_at_once() -> None:
    cluster = SimulatedCluster({"serve": 3})
    assert steps(cluster) == [{"a": 3}]
    assert cluster.plan().phase is RolloutPhase.COMPLETE


def test_a_revision_that_never_becomes_ready_halts_and_what_serves_stays() -> None:
    cluster = running(spec=RolloutSpec(max_surge=1, max_unavailable=1))
    cluster.revision, cluster.broken = "b", {"b"}
    state = cluster.settle()
    assert (state.phase, state.trouble) == (RolloutPhase.HALTED, "it fails")
    assert cluster.serving() == {"serve": 2}
    cluster.broken = set()
    assert cluster.settle().phase is RolloutPhase.COMPLETE


def test_a_new_pod_that_fails_halts_a_rollout_that_had_begun_well() -> None:
    cluster = running()
    cluster.revision = "b"
    while replicas(cluster)["a"] > 1:
        steps_before = replicas(cluster).get("b", 0)
        cluster.run_pass()
        cluster.catch_up()
        cluster.load(WorkloadKey("serve", "b"), 3)
        cluster.observe()
        assert replicas(cluster)["b"] >= steps_before
    cluster.deployments[WorkloadKey("serve", "b")].pods.append("failing")
    cluster.deployments[WorkloadKey("serve", "b")].replicas += 1
    cluster.observe()
    assert cluster.run_pass().phase is RolloutPhase.HALTED
    assert replicas(cluster) == {"a": 1, "b": 3}


def test_a_rollback_scales_the_kept_workload_up_again_and_makes_no_other() -> None:
    cluster = running()
    cluster.revision = "b"
    cluster.settle()
    assert replicas(cluster) == {"a": 0, "b": 3}
    cluster.revision = "a"
    cluster.settle()
    assert replicas(cluster) == {"a": 3, "b": 0}
    numbers = {key.revision: each.number for key, each in cluster.deployments.items()}
    assert numbers == {"a": 3, "b": 2}


def test_a_rollback_in_the_middle_takes_the_new_pods_at_once() -> None:
    cluster = running(spec=RolloutSpec(max_surge=2))
    cluster.revision = "b"
    cluster.run_pass()
    cluster.catch_up()
    cluster.observe()
    assert replicas(cluster) == {"a": 3, "b": 2}
    cluster.revision = "a"
    cluster.run_pass()
    assert replicas(cluster) == {"a": 3, "b": 0}


def test_an_obsolete_first_try_that_never_served_makes_room_at_once() -> None:
    cluster = SimulatedCluster({"serve": 2})
    cluster.run_pass()
    cluster.catch_up()
    cluster.observe()
    cluster.revision = "b"
    cluster.run_pass()
    assert replicas(cluster) == {"a": 0, "b": 1}


def full(desired: int = 2) -> SimulatedCluster:
    """Whose first revision has no node for any of its pods; the second one has come."""
    cluster = SimulatedCluster({"serve": desired}, is_full=True)
    cluster.run_pass()
    cluster.catch_up()
    cluster.observe()
    cluster.revision = "b"
    return cluster


def test_pods_that_no_node_has_are_replaced_at_once() -> None:
    cluster = full()
    cluster.run_pass()
    assert replicas(cluster) == {"a": 0, "b": 2}


def test_pods_that_go_without_a_node_are_waited_for_no_more_than_those_that_are_about_to_go() -> None:
    cluster = full(4)
    cluster.run_pass(is_left=True)
    assert replicas(cluster) == {"a": 4, "b": 4}
    cluster.deployments[WorkloadKey("serve", "a")].replicas = 0
    cluster.desired["serve"] = 5
    cluster.run_pass()
    assert replicas(cluster) == {"a": 0, "b": 5}


def test_one_pod_on_a_node_is_enough_for_all_of_its_workload_to_hold_their_room() -> None:
    cluster = full(3)
    cluster.deployments[WorkloadKey("serve", "a")].pods[0] = "loading"
    cluster.observe()
    cluster.run_pass()
    assert replicas(cluster) == {"a": 0, "b": 1}


def test_pods_that_are_not_made_yet_may_be_on_a_node_soon() -> None:
    cluster = full()
    cluster.deployments[WorkloadKey("serve", "a")].seen.pop()
    cluster.run_pass()
    assert replicas(cluster) == {"a": 0, "b": 1}


def test_pods_without_a_node_stay_in_their_room_while_their_revision_serves() -> None:
    cluster = running({"serve": 2})
    cluster.desired["serve"], cluster.is_full = 3, True
    cluster.run_pass()
    cluster.catch_up()
    cluster.observe()
    cluster.revision = "b"
    cluster.run_pass()
    assert replicas(cluster) == {"a": 3, "b": 1}


def test_pods_that_were_ready_once_are_waited_for() -> None:
    cluster = running({"serve": 2})
    cluster.deployments[WorkloadKey("serve", "a")].pods = ["gone quiet", "gone quiet"]
    cluster.observe()
    cluster.revision = "b"
    cluster.run_pass()
    assert replicas(cluster) == {"a": 2, "b": 1}


def test_old_pods_that_are_not_ready_go_first() -> None:
    """Of two former revisions, that which serves less."""
    cluster = running({"serve": 4}, RolloutSpec(max_surge=2))
    cluster.revision = "b"
    cluster.run_pass()
    cluster.catch_up()
    cluster.load(WorkloadKey("serve", "b"), 1)
    cluster.observe()
    cluster.revision = "c"
    cluster.run_pass()
    cluster.catch_up()
    cluster.observe()
    assert replicas(cluster) == {"a": 4, "b": 0, "c": 0}


def test_scaling_up_during_a_rollout_that_has_shown_nothing_goes_to_what_serves() -> None:
    cluster = running({"serve": 2})
    cluster.revision, cluster.broken = "b", {"b"}
    cluster.settle()
    cluster.desired["serve"] = 5
    cluster.settle()
    assert replicas(cluster) == {"a": 5, "b": 1}


def test_scaling_up_during_a_rollout_that_goes_well_goes_to_the_new_revision() -> None:
    cluster = running({"serve": 2})
    cluster.revision = "b"
    cluster.run_pass()
    cluster.catch_up()
    cluster.load(WorkloadKey("serve", "b"))
    cluster.observe()
    cluster.desired["serve"] = 5
    cluster.run_pass()
    assert replicas(cluster) == {"a": 2, "b": 4}


def test_scaling_down_needs_no_rollout() -> None:
    cluster = running({"serve": 4})
    cluster.desired["serve"] = 1
    cluster.run_pass()
    assert replicas(cluster) == {"a": 1}


def test_nothing_wanted_is_nothing_kept_of_any_revision() -> None:
    cluster = running()
    cluster.revision = "b"
    cluster.run_pass()
    cluster.desired["serve"] = 0
    cluster.run_pass()
    assert replicas(cluster) == {"a": 0, "b": 0}


def test_what_blocks_starts_nothing_and_stops_nothing() -> None:
    cluster = running()
    cluster.revision = "b"
    plan = cluster.plan(blocked="tensor: 4")
    assert plan.replicas == {WorkloadKey("serve", "a"): 3, WorkloadKey("serve", "b"): 0}
    assert (plan.phase, plan.trouble) == (RolloutPhase.HALTED, "tensor: 4")


def test_a_service_that_waits_for_its_turn_stays_as_it_is_and_scales() -> None:
    cluster = running()
    cluster.revision, cluster.desired = "b", {"serve": 5}
    plan = cluster.plan(is_waiting=True)
    assert plan.replicas == {WorkloadKey("serve", "a"): 5, WorkloadKey("serve", "b"): 0}
    assert plan.phase is RolloutPhase.WAITING


def test_a_service_that_nothing_serves_does_not_wait() -> None:
    plan = SimulatedCluster({"serve": 3}).plan(is_waiting=True)
    assert plan.replicas == {WorkloadKey("serve", "a"): 3}


def test_a_blocked_service_without_a_past_has_no_pods() -> None:
    plan = SimulatedCluster({"serve": 3}).plan(blocked="hf://")
    assert plan.replicas == {WorkloadKey("serve", "a"): 0}


def test_a_blocked_service_at_zero_wakes_no_former_revision_which_has_no_service_any_more() -> None:
    cluster = running({"serve": 0})
    cluster.revision = "b"
    cluster.settle()
    cluster.desired = {"serve": 1}
    plan = cluster.plan(blocked="tensor: 4")
    assert plan.replicas == {WorkloadKey("serve", "a"): 0, WorkloadKey("serve", "b"): 0}


def canary(weight: int, pause: bool = True, max_surge: int = 1, max_unavailable: int = 0) -> RolloutSpec:
    return RolloutSpec(max_surge, max_unavailable, canary=CanarySpec(weight, pause))


def test_a_canary_gets_its_share_of_the_pods_and_waits() -> None:
    cluster = running({"serve": 10})
    cluster.revision, cluster.spec = "b", canary(15)
    state = cluster.settle()
    assert (state.phase, state.traffic_weight) == (RolloutPhase.PAUSED, 15)
    assert replicas(cluster) == {"a": 9, "b": 2}
    cluster.spec = canary(15, pause=False)
    plan = cluster.settle()
    assert (plan.phase, plan.traffic_weight) == (RolloutPhase.COMPLETE, None)
    assert replicas(cluster) == {"a": 0, "b": 10}


def test_a_canary_of_a_small_service_has_one_pod_beside_all_that_serve() -> None:
    cluster = running({"serve": 2})
    cluster.revision, cluster.spec = "b", canary(10)
    cluster.settle()
    assert replicas(cluster) == {"a": 2, "b": 1}


def test_a_canary_without_surge_replaces_a_pod() -> None:
    cluster = running({"serve": 2}, canary(10, max_surge=0, max_unavailable=1))
    cluster.revision = "b"
    cluster.settle()
    assert replicas(cluster) == {"a": 1, "b": 1}


def test_a_canary_carries_its_weight_before_its_first_pod() -> None:
    cluster = running({"serve": 10})
    cluster.revision, cluster.spec = "b", canary(10)
    assert cluster.run_pass().traffic_weight == 10


def test_a_large_surge_does_not_make_a_canary_large() -> None:
    cluster = running({"serve": 10})
    cluster.revision, cluster.spec = "b", canary(10, max_surge=10)
    cluster.run_pass()
    assert replicas(cluster) == {"a": 10, "b": 1}


def test_a_canary_that_is_taken_back_goes_at_once_and_is_no_canary_in_turn() -> None:
    cluster = running({"serve": 1}, canary(10))
    cluster.revision = "b"
    cluster.settle()
    cluster.revision = "a"
    assert cluster.run_pass().traffic_weight is None
    assert replicas(cluster) == {"a": 1, "b": 0}


def test_a_canary_after_a_canary_replaces_it_and_not_what_serves() -> None:
    cluster = running({"serve": 10}, canary(10))
    for revision in ("b", "c"):
        cluster.revision = revision
        assert cluster.settle().traffic_weight == 10
    assert replicas(cluster) == {"a": 9, "b": 0, "c": 1}


def test_a_finished_rollout_is_not_a_canary_again() -> None:
    cluster = running({"serve": 2})
    cluster.spec = canary(10)
    assert cluster.is_at_rest()
    assert cluster.plan().phase is RolloutPhase.COMPLETE


def test_a_canarys_share_follows_the_pods_that_are_wanted() -> None:
    cluster = running({"serve": 10}, canary(50))
    cluster.revision = "b"
    cluster.settle()
    cluster.desired["serve"] = 4
    cluster.settle()
    assert replicas(cluster) == {"a": 2, "b": 2}


def test_a_canarys_share_is_reached_without_surge() -> None:
    cluster = running({"serve": 10}, canary(45, max_surge=0, max_unavailable=1))
    cluster.revision = "b"
    cluster.settle()
    assert replicas(cluster) == {"a": 5, "b": 5}


def test_a_large_canary_without_surge_leaves_the_former_revision_a_pod() -> None:
    cluster = running({"serve": 2}, canary(90, max_surge=0, max_unavailable=1))
    cluster.revision = "b"
    assert cluster.settle().phase is RolloutPhase.PAUSED
    assert replicas(cluster) == {"a": 1, "b": 1}


def test_a_canary_that_has_shown_nothing_does_not_grow_with_the_service() -> None:
    cluster = running({"serve": 2}, canary(50))
    cluster.revision, cluster.broken = "b", {"b"}
    cluster.settle()
    cluster.desired["serve"] = 10
    cluster.settle()
    assert replicas(cluster) == {"a": 10, "b": 1}


SPLIT = {"prefill": 2, "decode": 8}


def test_neither_prefill_nor_decode_runs_ahead() -> None:
    cluster = running(SPLIT)
    cluster.revision = "b"
    while not cluster.is_at_rest():
        prefill, decode = (replicas(cluster, role).get("b", 0) for role in SPLIT)
        assert prefill <= math.ceil(2 * (decode + 1) / 8)
        assert decode <= math.ceil(8 * (prefill + 1) / 2)
        cluster.run_pass()
        cluster.catch_up()
        for key in cluster.deployments:
            cluster.load(key)
        cluster.observe()
    assert cluster.serving() == SPLIT


def test_a_last_prefill_stays_until_its_decodes_go_too() -> None:
    cluster = running({"prefill": 1, "decode": 3})
    cluster.revision = "b"
    while not cluster.is_at_rest():
        olds = {role: replicas(cluster, role)["a"] for role in cluster.desired}
        assert all(olds.values()) or not any(olds.values())
        cluster.run_pass()
        cluster.catch_up()
        for key in cluster.deployments:
            cluster.load(key)
        cluster.observe()
    assert cluster.serving() == {"prefill": 1, "decode": 3}


def test_a_last_decode_that_fails_is_kept_for_no_prefill() -> None:
    past = [serving("a", 1, 2), replace(serving("a", 1, 1), num_ready=0, num_useless=1), serving("b", 2, 1)]
    roles = ("prefill", "decode", "prefill")
    workloads = [
        replace(each, key=WorkloadKey(role, each.key.revision)) for each, role in zip(past, roles, strict=True)
    ]
    current = replace(serving("b", 2, 1), key=WorkloadKey("decode", "b"))
    plan = plan_rollout("b", {"prefill": 3, "decode": 1}, RolloutSpec(), [*workloads, current])
    assert plan.replicas[WorkloadKey("decode", "a")] == 0


def test_prefill_without_decode_replaces_nothing() -> None:
    cluster = running({"prefill": 2, "decode": 2})
    cluster.revision = "b"
    cluster.run_pass()
    cluster.catch_up()
    cluster.load(WorkloadKey("prefill", "b"))
    cluster.observe()
    cluster.run_pass()
    assert replicas(cluster, "prefill") == {"a": 2, "b": 1}
    cluster.load(WorkloadKey("decode", "b"))
    cluster.observe()
    cluster.run_pass()
    assert replicas(cluster, "prefill") == {"a": 1, "b": 1}


def test_a_service_that_is_split_serves_undivided_until_both_parts_do() -> None:
    cluster = running({"serve": 2})
    cluster.revision, cluster.desired = "b", {"prefill": 1, "decode": 1}
    cluster.run_pass()
    cluster.catch_up()
    cluster.load(WorkloadKey("prefill", "b"))
    cluster.observe()
    cluster.run_pass()
    assert replicas(cluster, "serve") == {"a": 2}
    cluster.load(WorkloadKey("decode", "b"))
    cluster.observe()
    cluster.run_pass()
    assert replicas(cluster, "serve") == {"a": 0}


def former(revision: str, number: int, num_leaving: int = 0) -> Workload:
    return Workload(WorkloadKey("serve", revision), number, num_leaving=num_leaving)


def serving(revision: str, number: int, pods: int) -> Workload:
    return Workload(WorkloadKey("serve", revision), number, pods, num_pods=pods, num_ready=pods)


def planned(desired: int, spec: RolloutSpec, *workloads: Workload) -> dict[str, int]:
    """Replicas by revision, with `new` as the current one."""
    plan = plan_rollout("new", {"serve": desired}, spec, workloads)
    return {key.revision: number for key, number in plan.replicas.items()}


def test_a_pass_right_after_a_write_does_not_act_on_what_was_seen_before_it() -> None:
    """Three pods of the old revision are still seen as ready, but one of them is just about to go."""
    scaled = replace(serving("old", 1, 3), replicas=2)
    assert planned(3, RolloutSpec(), scaled, serving("new", 2, 1)) == {"old": 2, "new": 1}


def test_pods_that_are_still_going_hold_their_room() -> None:
    going = replace(serving("old", 1, 4), replicas=2)
    assert planned(5, RolloutSpec(), going) == {"old": 3, "new": 1}


def test_of_former_revisions_that_serve_alike_the_oldest_goes_first() -> None:
    former = (serving("b", 2, 2), serving("a", 1, 2))
    assert planned(4, RolloutSpec(), *former, serving("new", 3, 1)) == {"a": 1, "b": 2, "new": 1}


def test_a_canary_that_was_given_up_and_comes_back_is_a_canary_still() -> None:
    back = replace(serving("new", 2, 1), traffic_weight=0)
    assert planned(3, canary(10), serving("old", 1, 3), back) == {"old": 3, "new": 1}


def test_what_grows_of_former_revisions_is_what_serves_most() -> None:
    former = (serving("b", 2, 1), serving("a", 1, 3))
    assert planned(8, RolloutSpec(), *former) == {"a": 7, "b": 1, "new": 1}


def test_trouble_of_one_pod_takes_nothing_more_from_what_serves() -> None:
    key = WorkloadKey("serve", "new")
    failing = Workload(key, 2, 2, num_pods=2, num_ready=1, num_useless=1, trouble="it fails")
    assert planned(4, RolloutSpec(max_surge=2), serving("old", 1, 4), failing) == {"old": 4, "new": 2}


def test_scaling_down_while_halted_takes_what_is_too_much() -> None:
    failing = Workload(WorkloadKey("serve", "new"), 2, 1, num_pods=1, num_useless=1, trouble="it fails")
    assert planned(2, RolloutSpec(max_surge=5), serving("old", 1, 4), failing) == {"old": 2, "new": 2}


def test_pods_that_may_come_back_are_not_all_taken_for_a_first_try() -> None:
    quiet = replace(serving("old", 1, 2), num_ready=0)
    assert planned(2, RolloutSpec(1, "100%"), quiet) == {"old": 1, "new": 1}


def test_pods_that_may_come_back_go_only_as_far_as_enough_others_are_there() -> None:
    """Six pods, four wanted; of the new revision's three one still loads."""
    new = replace(serving("new", 3, 3), num_ready=2, num_useless=1)
    quiet = [replace(serving(name, number, pods), num_ready=0) for name, number, pods in (("a", 1, 2), ("b", 2, 1))]
    assert planned(4, RolloutSpec(max_surge=2), *quiet, new) == {"a": 1, "b": 1, "new": 3}


def test_former_revisions_share_what_may_be_taken() -> None:
    former = (serving("a", 1, 2), serving("b", 2, 1))
    assert planned(3, RolloutSpec(max_surge=2), *former, serving("new", 3, 1)) == {"a": 2, "b": 0, "new": 2}


def test_a_revision_keeps_its_number_while_it_is_the_highest() -> None:
    plan = plan_rollout("new", {"serve": 1}, RolloutSpec(), [former("a", 3), serving("new", 5, 1)])
    assert plan.number == 5


def test_without_surge_prefill_and_decode_do_not_wait_for_each_other_for_ever() -> None:
    for desired in ({"prefill": 2, "decode": 8}, {"prefill": 1, "decode": 4}):
        cluster = running(desired, RolloutSpec(0, 1))
        cluster.revision = "b"
        assert cluster.settle().phase is RolloutPhase.COMPLETE


def test_a_role_that_is_scaled_to_nothing_goes_whatever_its_partner_does() -> None:
    cluster = running({"prefill": 2, "decode": 2})
    cluster.revision = "b"
    cluster.run_pass()
    cluster.desired["prefill"] = 0
    cluster.run_pass()
    assert replicas(cluster, "prefill") == {"a": 0, "b": 0}


def split(cluster: SimulatedCluster) -> dict[str, int]:
    """Replicas of the undivided role after the pass that splits the service."""
    cluster.revision, cluster.desired = "b", {"prefill": 1, "decode": 1}
    cluster.run_pass()
    return replicas(cluster, "serve")


def test_what_is_split_keeps_what_serves_even_if_a_pod_may_lack() -> None:
    assert split(running({"serve": 1}, RolloutSpec(1, 1))) == {"a": 1}


def test_what_is_split_before_it_served_makes_room_at_once() -> None:
    cluster = SimulatedCluster({"serve": 2})
    cluster.run_pass()
    cluster.catch_up()
    cluster.observe()
    assert split(cluster) == {"a": 0}


def test_a_canary_that_splits_the_service_leaves_it_undivided_beside() -> None:
    cluster = running({"serve": 2}, canary(50))
    split(cluster)
    assert cluster.settle().phase is RolloutPhase.PAUSED
    assert replicas(cluster, "serve") == {"a": 2}


def test_a_role_that_wants_no_pods_holds_nothing_up() -> None:
    cluster = running({"prefill": 0, "decode": 2})
    cluster.revision = "b"
    assert cluster.settle().phase is RolloutPhase.COMPLETE


def test_only_revisions_used_last_are_kept_at_zero() -> None:
    past = [former("a", 1), former("b", 4), former("c", 2), former("d", 3)]
    plan = plan_rollout("e", {"serve": 1}, RolloutSpec(history_limit=2), past)
    assert plan.number == 5
    assert {key.revision for key in plan.expired} == {"a", "c"}


def test_nothing_that_still_has_pods_is_history() -> None:
    past = [former("a", 1, num_leaving=1), former("b", 2)]
    plan = plan_rollout("e", {"serve": 1}, RolloutSpec(history_limit=0), past)
    assert {key.revision for key in plan.expired} == {"b"}


def test_both_roles_of_a_revision_are_kept_or_deleted_together() -> None:
    past = [Workload(WorkloadKey("prefill", "a"), 1), Workload(WorkloadKey("decode", "a"), 1, num_leaving=1)]
    plan = plan_rollout("e", {"prefill": 1, "decode": 1}, RolloutSpec(history_limit=0), past)
    assert plan.expired == frozenset()


SPLIT_CANARIES = [
    # (prefill, decode) wanted, weight, maxSurge and maxUnavailable, (prefill, decode) of the canary, and of the other
    ((1, 1), 10, (1, 0), (1, 1), (1, 1)),
    ((2, 8), 10, (1, 0), (1, 1), (2, 8)),
    ((2, 8), 50, (1, 0), (1, 4), (1, 4)),
    ((2, 8), 50, (0, 1), (1, 4), (1, 4)),
    ((2, 2), 90, (0, 1), (1, 1), (1, 1)),
    ((3, 4), 99, ("100%", 0), (3, 4), (1, 1)),
]


@pytest.mark.parametrize(("wanted", "weight", "surge", "new", "old"), SPLIT_CANARIES)
def test_a_canary_of_a_split_service_has_both_roles_until_it_is_let_go_on_or_taken_back(
    wanted: Pods, weight: int, surge: tuple[int | str, int | str], new: Pods, old: Pods
) -> None:
    cluster = running(dict(zip(SPLIT, wanted, strict=True)), RolloutSpec(*surge))
    held, let_go = (RolloutSpec(*surge, canary=CanarySpec(weight, pause)) for pause in (True, False))
    cluster.revision, cluster.spec = "b", held
    state = cluster.settle()
    assert (state.phase, state.traffic_weight) == (RolloutPhase.PAUSED, weight)
    assert (pods_of(cluster, "b"), pods_of(cluster, "a")) == (new, old)
    cluster.revision = "a"
    assert cluster.settle().traffic_weight is None
    assert (pods_of(cluster, "b"), pods_of(cluster, "a")) == ((0, 0), wanted)
    cluster.revision, cluster.spec = "b", let_go
    assert cluster.settle().traffic_weight is None
    assert (pods_of(cluster, "b"), pods_of(cluster, "a")) == (wanted, (0, 0))


def pods_of(cluster: SimulatedCluster, revision: str) -> Pods:
    prefill, decode = (replicas(cluster, role)[revision] for role in SPLIT)
    return prefill, decode


def test_a_canarys_decode_that_serves_without_its_prefill_takes_nothing_from_the_former_revision() -> None:
    cluster = running({"prefill": 2, "decode": 2}, canary(50))
    cluster.revision = "b"
    cluster.run_pass()
    cluster.catch_up()
    cluster.load(WorkloadKey("decode", "b"))
    cluster.observe()
    assert cluster.run_pass().phase is RolloutPhase.PROGRESSING
    assert (pods_of(cluster, "b"), pods_of(cluster, "a")) == ((1, 1), (2, 2))
