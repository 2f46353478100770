"""When a group's pods are deleted together, how long that is put off, and what is recorded of it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.cluster_objects import NOW, KubeObject, leader_worker_set, member, stateful_set

from kvasir_operator.groups.group import Group
from kvasir_operator.groups.record import RESTARTS, RestartRecord
from kvasir_operator.groups.restart import MAX_RESTARTS, RestartDecision, decide_restart, record_after

OOM = {"exitCode": 137, "reason": "OOMKilled"}


def at(seconds: float) -> str:
    """So long after NOW."""
    moment = datetime.fromisoformat(NOW) + timedelta(seconds=seconds)
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ended(finished_at: float, **terminated: Any) -> KubeObject:
    """Status of a pod whose container has ended, and was not started again yet."""
    end = {"exitCode": 1, "reason": "Error", "finishedAt": at(finished_at), **terminated}
    return {"containerStatuses": [{"name": "engine", "state": {"terminated": end}, "ready": False, "restartCount": 0}]}


def back(started_at: float, changed_at: float, ready: bool = False) -> KubeObject:
    """Status of a pod whose container was started again; its readiness last changed at `changed_at`."""
    state = {"running": {"startedAt": at(started_at)}}
    container = {"name": "engine", "state": state, "ready": ready, "restartCount": 1}
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": at(changed_at)}
    return {"containerStatuses": [container], "conditions": [condition]}


def leaving(pod: KubeObject, told_at: float, grace: float = 300) -> KubeObject:
    pod["metadata"] |= {"deletionTimestamp": at(told_at + grace), "deletionGracePeriodSeconds": grace}
    return pod


def group_of(*pods: KubeObject, record: RestartRecord | None = None) -> Group:
    annotations = {} if record is None else {RESTARTS: record.text()}
    return Group(stateful_set(**annotations), pods)


SET = stateful_set()
HEALTHY = (member(0, SET), member(1, SET))


def deleted(decision: RestartDecision) -> dict[str, int | None]:
    """Grace by the last part of the pod's name."""
    pods = () if decision.restart is None else decision.restart.pods
    return {pod.name.rpartition("-")[2]: pod.grace_seconds for pod in pods}


def test_nothing_is_done_to_pods_that_run_or_load() -> None:
    loading = member(1, SET, ready=False)
    assert decide_restart(group_of(*HEALTHY), at(10)) == RestartDecision()
    assert decide_restart(group_of(HEALTHY[0], loading), at(10)) == RestartDecision()
    assert decide_restart(group_of(), at(10)) == RestartDecision()


def test_a_pod_that_failed_takes_all_others_along_at_once() -> None:
    decision = decide_restart(group_of(member(0, SET), member(1, SET, ready=False, **ended(30, **OOM))), at(31))
    assert deleted(decision) == {"0": 1, "1": 1}
    assert decision.restart is not None
    assert decision.restart.cause.startswith("pod llama-serve-aaaa-0-1: container engine ended with exit code 137")


def test_the_restart_is_recorded_with_its_time_its_cause_and_the_node_where_the_first_pod_failed() -> None:
    pods = [member(0, SET, ready=False, **ended(31)), member(1, SET, ready=False, **ended(30, **OOM))]
    record = record_after(group_of(*pods), decide_restart(group_of(*pods), at(33)))
    assert (record.num_restarts, record.last, record.nodes) == (1, at(33), {"node-1": 1})
    assert "137" in record.cause


@pytest.mark.parametrize(
    ("status", "is_failed"),
    [
        (back(started_at=40, changed_at=30), True),
        (back(started_at=40, changed_at=60), False),
        (back(started_at=40, changed_at=60, ready=True), False),
        ({"containerStatuses": [{"name": "engine", "state": {"waiting": {}}, "restartCount": 1}]}, True),
        ({"containerStatuses": [{"name": "engine", "state": {"waiting": {}}, "restartCount": 0}]}, False),
        ({"containerStatuses": [{"name": "istio-proxy", "state": {"terminated": {}}, "restartCount": 1}]}, False),
        ({}, False),
    ],
    ids=[
        "started again",
        "ready since then",
        "ready again",
        "waits to be started again",
        "being made",
        "a sidecar",
        "unknown",
    ],
)
def test_what_was_ready_again_since_it_failed_is_no_failure(status: KubeObject, is_failed: bool) -> None:
    decision = decide_restart(group_of(member(0, SET), member(1, SET, ready=False, **status)), at(100))
    assert bool(deleted(decision)) == is_failed


@pytest.mark.parametrize(
    ("num_before", "seconds", "is_restarted"),
    [(1, 9, False), (1, 10, True), (2, 19, False), (2, 20, True), (3, 39, False), (5, 159, False), (5, 160, True)],
)
def test_further_restarts_wait_twice_as_long_each(num_before: int, seconds: float, is_restarted: bool) -> None:
    record = RestartRecord(num_before, NOW, "it failed", {})
    failed = [member(0, SET, at=at(1), ready=False, **ended(2)), member(1, SET, at=at(1))]
    decision = decide_restart(group_of(*failed, record=record), at(seconds))
    assert bool(decision.restart) == is_restarted
    assert decision.retry_seconds == (None if is_restarted else 10 * 2 ** (num_before - 1) - seconds)


def test_within_an_hour_the_restarts_are_bounded() -> None:
    record = RestartRecord(MAX_RESTARTS, NOW, "it failed", {})
    failed = [member(0, SET, at=at(1), ready=False, **ended(2)), member(1, SET, at=at(1))]
    exhausted = decide_restart(group_of(*failed, record=record), at(3599))
    assert (exhausted.restart, exhausted.retry_seconds) == (None, 1)
    forgotten = decide_restart(group_of(*failed, record=record), at(3600))
    assert record_after(group_of(*failed, record=record), forgotten).num_restarts == 1


def test_a_restart_names_the_pods_that_it_deletes() -> None:
    group = group_of(*(pods := [member(0, SET, ready=False, **ended(50)), member(1, SET)]))
    assert record_after(group, decide_restart(group, at(100))).pods == {pod["metadata"]["uid"] for pod in pods}


@pytest.mark.parametrize("recorded_at", [-60, 60, 6000])
def test_pods_of_a_recorded_restart_are_still_to_go_whatever_the_clocks_say(recorded_at: float) -> None:
    old, new = member(0, SET, at=at(59), ready=False, **ended(50)), member(1, SET, at=at(60), ready=False)
    record = RestartRecord(1, at(recorded_at), "it failed", {}, frozenset({old["metadata"]["uid"]}))
    decision = decide_restart(group_of(old, new, record=record), at(61))
    assert deleted(decision) == {"0": 1}
    assert decision.restart is not None
    assert decision.restart.annotations == {}


def test_a_pod_that_is_told_to_go_takes_the_others_along_with_their_own_grace() -> None:
    drained = leaving(member(1, SET), told_at=30)
    decision = decide_restart(group_of(member(0, SET), drained), at(31))
    assert deleted(decision) == {"0": None}
    assert decision.restart is not None
    assert "pod llama-serve-aaaa-0-1 was told to go" in decision.restart.cause
    assert record_after(group_of(), decision) == RestartRecord()


@pytest.mark.parametrize(("made_at", "is_successor"), [(29, False), (30, False), (31, True)])
def test_successors_wait_for_the_pods_that_are_still_leaving(made_at: float, is_successor: bool) -> None:
    told = leaving(member(1, SET), told_at=30)
    decision = decide_restart(group_of(member(0, SET, at=at(made_at)), told), at(31))
    assert (deleted(decision) == {}) == is_successor
    assert decision.retry_seconds == 360.0  # 30 + 300 + 60, and a second more


def test_a_pod_whose_node_does_not_end_it_is_given_up_a_minute_after_its_grace() -> None:
    lost = leaving(member(1, SET), told_at=0, grace=10)
    assert deleted(decide_restart(group_of(lost), at(70))) == {}
    assert deleted(decide_restart(group_of(lost), at(71))) == {"1": 0}


def test_a_pod_that_was_evicted_is_replaced_by_kubernetes() -> None:
    evicted = member(1, SET, ready=False, phase="Failed")
    assert decide_restart(group_of(member(0, SET), evicted), at(10)) == RestartDecision()


LED = leader_worker_set()


def led(*pods: KubeObject, record: RestartRecord | None = None) -> Group:
    return Group(leader_worker_set(**({} if record is None else {RESTARTS: record.text()})), pods)


def in_foreground(decision: RestartDecision) -> list[bool]:
    return [] if decision.restart is None else [pod.is_foreground for pod in decision.restart.pods]


def test_a_leader_goes_first_and_in_the_foreground_so_that_no_worker_is_made_for_it_again() -> None:
    decision = decide_restart(led(member(1, LED, ready=False, **ended(30)), member(0, LED)), at(31))
    assert decision.restart is not None
    assert [pod.name for pod in decision.restart.pods] == ["llama-serve-aaaa-0-0", "llama-serve-aaaa-0-0-1"]
    assert in_foreground(decision) == [True, False]
    assert deleted(decision) == {"0": 1, "1": 1}
    assert RestartRecord.of({"metadata": {"annotations": decision.restart.annotations}}).num_restarts == 1


def test_a_stateful_set_knows_no_such_order() -> None:
    decision = decide_restart(group_of(member(1, SET, ready=False, **ended(30)), member(0, SET)), at(31))
    assert in_foreground(decision) == [False, False]


@pytest.mark.parametrize("leaders", [[], [leaving(member(0, LED), told_at=30)]], ids=["not made yet", "leaving"])
def test_without_its_leader_a_worker_is_kubernetes_to_delete(leaders: list[KubeObject]) -> None:
    failed = member(1, LED, ready=False, **ended(30))
    assert decide_restart(led(*leaders, failed), at(31)).restart is None


def test_but_one_whose_node_does_not_end_it_is_given_up() -> None:
    pods = [leaving(member(rank, LED), told_at=0, grace=10 * rank) for rank in (1, 2)]
    decision = decide_restart(led(*pods), at(71))
    assert (deleted(decision), in_foreground(decision)) == ({"1": 0}, [False])


def test_a_worker_that_is_told_to_go_takes_its_leader_along_which_finishes_its_requests() -> None:
    told = leaving(member(1, LED), told_at=30)
    decision = decide_restart(led(member(0, LED), told), at(31))
    assert (deleted(decision), in_foreground(decision)) == ({"0": None}, [True])


@pytest.mark.parametrize(("made_at", "is_of_former"), [(19, True), (20, False)])
def test_a_worker_that_goes_because_its_leader_went_leaves_the_next_leader_alone(
    made_at: float, is_of_former: bool
) -> None:
    told = leaving(member(1, LED, at=at(made_at)), told_at=30)
    decision = decide_restart(led(member(0, LED, at=at(20)), told), at(31))
    assert (decision.restart is None) == is_of_former


def test_a_worker_that_ends_because_its_leader_has_gone_is_no_failure_of_the_next() -> None:
    worker = member(1, LED, at=at(0), ready=False, **ended(30))
    assert decide_restart(led(member(0, LED, at=at(30)), worker), at(31)).restart is None
    assert decide_restart(led(member(0, LED, at=at(0)), worker), at(31)).restart is not None


def test_a_recorded_restart_of_a_leader_that_was_not_deleted_is_carried_out() -> None:
    pods = [member(0, LED, at=at(59)), member(1, LED, at=at(59))]
    record = RestartRecord(1, at(60), "it failed", {}, frozenset(pod["metadata"]["uid"] for pod in pods))
    decision = decide_restart(led(*pods, record=record), at(61))
    assert (deleted(decision), in_foreground(decision)) == ({"0": 1, "1": 1}, [True, False])
