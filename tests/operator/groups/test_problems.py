"""What the status says of groups."""

from tests.operator.cluster_objects import NOW, member, pod, stateful_set

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import LEADER_WORKER_SET_LABEL
from kvasir_operator.groups.group import Group
from kvasir_operator.groups.record import RESTARTS, RestartRecord
from kvasir_operator.groups.restart import group_problems, removed_sets
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, STATEFUL_SET

LATER = "2026-11-20T10:30:00Z"


def restarted(num_restarts: int, nodes: dict[str, int] | None = None, is_ready: bool = False) -> Group:
    record = RestartRecord(num_restarts, NOW, "pod p: container engine ended with exit code 1", nodes or {})
    found = stateful_set(**{RESTARTS: record.text()})
    return Group(found, (member(0, found, ready=is_ready), member(1, found)))


def test_a_group_that_fails_says_how_often_and_why() -> None:
    [problem] = group_problems([restarted(2)], LATER)
    assert problem.reason is Reason.GROUP_RESTARTED
    assert problem.message == (
        "group llama-serve-aaaa-0 was restarted 2 times in a row, and may be again 20 s after the last: "
        "pod p: container engine ended with exit code 1"
    )


def test_one_that_is_left_alone_says_so() -> None:
    [problem] = group_problems([restarted(6)], LATER)
    assert problem.reason is Reason.GROUP_RESTARTS_EXHAUSTED
    assert "6 times in a row, and is left alone for 60 min" in problem.message


def test_one_that_has_recovered_or_failed_long_ago_says_nothing() -> None:
    assert group_problems([restarted(2, is_ready=True)], LATER) == []
    assert group_problems([restarted(2)], "2026-11-20T11:00:00Z") == []
    assert group_problems([Group(stateful_set(), ())], LATER) == []


def test_a_node_that_is_avoided_is_named_while_the_group_serves_elsewhere() -> None:
    [problem] = group_problems([restarted(2, {"bad": 2, "good": 1}, is_ready=True)], LATER)
    assert problem.reason is Reason.NODE_AVOIDED
    assert "group llama-serve-aaaa-0 avoids node bad, failures began there 2 times" in problem.message


def test_a_group_that_is_kept_without_pods_has_no_problems() -> None:
    kept = stateful_set(is_running=False, **{RESTARTS: RestartRecord(2, NOW, "x", {"bad": 2}).text()})
    assert group_problems([Group(kept, ())], LATER) == []


def test_groups_whose_kind_was_removed_are_named_until_their_pods_have_gone() -> None:
    of_a_set = pod("a-0")
    of_a_set["metadata"]["labels"][LEADER_WORKER_SET_LABEL] = "a"
    [problem] = removed_sets([of_a_set, pod("b-0")], STATEFUL_SET)
    assert problem.reason is Reason.LEADER_WORKER_SETS_REMOVED
    assert "and with it a: StatefulSets take their place" in problem.message
    assert removed_sets([of_a_set], LEADER_WORKER_SET) == []
    assert removed_sets([pod("b-0")], STATEFUL_SET) == []
