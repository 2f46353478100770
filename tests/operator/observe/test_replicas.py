"""Pods as replicas: single ones, and groups of which the first pod speaks for all."""

from tests.operator.cluster_objects import member, pod, stateful_set

from kvasir_operator.observe.replicas import Replica, replicas_of

SET, OTHER = stateful_set(0), stateful_set(1)


def test_pods_of_a_group_are_one_replica_and_others_are_their_own() -> None:
    found = replicas_of([pod("a"), member(1, SET), member(0, OTHER), member(0, SET)])
    assert [(replica.name, len(replica.pods)) for replica in found] == [
        ("a", 1),
        ("llama-serve-aaaa-0", 2),
        ("llama-serve-aaaa-1", 1),
    ]


def test_a_group_is_ready_when_its_first_pod_is() -> None:
    [loads] = replicas_of([member(0, SET, ready=False), member(1, SET)])
    [serves] = replicas_of([member(0, SET), member(1, SET, ready=False)])
    [headless] = replicas_of([member(1, SET)])
    assert [replica.is_ready for replica in (loads, serves, headless)] == [False, True, False]


def test_a_group_is_leaving_once_all_its_pods_are() -> None:
    [one] = replicas_of([member(0, SET), member(1, SET, leaving=True)])
    [both] = replicas_of([member(0, SET, leaving=True), member(1, SET, leaving=True)])
    assert (one.is_leaving, both.is_leaving) == (False, True)


def test_pods_that_are_given_up_or_leaving_are_not_active() -> None:
    pods = (pod("a"), pod("b", leaving=True), pod("c", phase="Failed"), pod("d", phase="Succeeded"))
    assert [each["metadata"]["name"] for each in Replica("r", pods).active_pods] == ["a"]


def test_a_group_is_leaving_with_the_pod_that_takes_its_requests() -> None:
    [draining] = replicas_of([member(0, SET, leaving=True), member(1, SET)])
    [evicted] = replicas_of([member(0, SET), member(1, SET, leaving=True)])
    assert [(each.is_leaving, each.is_active) for each in (draining, evicted)] == [(True, False), (False, True)]
