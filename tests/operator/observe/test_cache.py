"""What the cache holds after news that comes in any order."""

from typing import Any

import pytest
from tests.operator.cluster_objects import service

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.kube.kinds import (
    DEPLOYMENT,
    INFERENCE_SERVICE,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    STATEFUL_SET,
    Kind,
    NamespacedName,
    ServiceKey,
)
from kvasir_operator.observe.cache import InformerCache

LLAMA, QWEN = ServiceKey("models", "llama"), ServiceKey("models", "qwen")


def child(version: int, service: str = "llama", name: str = "llama-engine", **fields: Any) -> dict[str, Any]:
    labels = {SERVICE_LABEL: service}
    metadata = {"name": name, "namespace": "models", "labels": labels, "resourceVersion": str(version)}
    return {"metadata": metadata, **fields}


def listed(*objects: dict[str, Any], version: int = 1) -> InformerCache:
    """A cache after a first list."""
    cache = InformerCache()
    for obj in objects:
        cache.put(SERVICE, obj)
    cache.finish_list(SERVICE, None, {NamespacedName("models", obj["metadata"]["name"]) for obj in objects}, version)
    return cache


def test_nothing_is_known_before_the_first_list_is_complete() -> None:
    cache = InformerCache()
    cache.put(SERVICE, child(1))
    assert cache.read(SERVICE, LLAMA) is None
    cache.finish_list(SERVICE, None, {NamespacedName("models", "llama-engine")}, 1)
    assert cache.read(SERVICE, LLAMA) == [child(1)]
    assert cache.read(SERVICE, QWEN) == []


def test_an_older_state_neither_replaces_a_newer_one_nor_is_news() -> None:
    cache, newer = listed(child(1)), child(5, spec={"ports": [8000]})
    assert cache.put(SERVICE, newer) == {LLAMA}
    assert cache.put(SERVICE, child(4)) == cache.put(SERVICE, newer) == set()
    assert cache.read(SERVICE, LLAMA) == [newer]


def test_an_own_write_is_seen_at_once_and_its_echo_is_no_news() -> None:
    cache = listed()
    cache.put_own(SERVICE, child(7))
    assert cache.read(SERVICE, LLAMA) == [child(7)]
    assert cache.put(SERVICE, child(7)) == set()


def test_an_own_write_that_was_deleted_before_its_answer_came_stays_away() -> None:
    cache = listed()
    cache.put(SERVICE, child(7))
    cache.remove(SERVICE, child(8))
    cache.advance(SERVICE, None, 8)
    cache.put_own(SERVICE, child(7))
    assert cache.read(SERVICE, LLAMA) == []


def test_the_deletion_of_a_predecessor_leaves_the_namesake() -> None:
    cache = listed(child(1))
    cache.remove_own(SERVICE, NamespacedName("models", "llama-engine"))
    cache.put_own(SERVICE, child(6))
    assert cache.remove(SERVICE, child(5)) == set()
    assert cache.read(SERVICE, LLAMA) == [child(6)]


def test_what_a_later_list_no_longer_has_is_gone_but_not_what_was_written_since() -> None:
    cache = listed(child(1, name="old"), child(2, name="kept"), version=2)
    cache.put_own(SERVICE, child(9, name="new"))
    assert cache.finish_list(SERVICE, None, {NamespacedName("models", "kept")}, 5) == {LLAMA}
    assert [each["metadata"]["name"] for each in cache.read(SERVICE, LLAMA) or []] == ["kept", "new"]


def test_a_list_of_an_earlier_version_makes_all_that_was_known_void() -> None:
    cache = listed(child(9), version=9)
    assert cache.begin_list(SERVICE, None, 10) == set()
    assert cache.begin_list(SERVICE, None, 5) == {LLAMA}
    assert cache.read(SERVICE, LLAMA) is None
    cache.put(SERVICE, child(3))
    assert cache.begin_list(SERVICE, None, 5) == set()  # its second page
    cache.finish_list(SERVICE, None, {NamespacedName("models", "llama-engine")}, 5)
    assert cache.read(SERVICE, LLAMA) == [child(3)]


def test_a_child_that_changes_its_label_is_news_for_both_services() -> None:
    cache = listed(child(1))
    assert cache.put(SERVICE, child(2, service="qwen")) == {LLAMA, QWEN}
    assert cache.read(SERVICE, LLAMA) == []
    assert cache.read(SERVICE, QWEN) == [child(2, service="qwen")]


def test_an_object_without_our_label_belongs_to_no_service() -> None:
    cache, stranger = listed(), child(1)
    del stranger["metadata"]["labels"]
    assert cache.put(SERVICE, stranger) == set()


def test_who_set_which_field_is_not_kept() -> None:
    cache = InformerCache()
    cache.finish_list(SERVICE, None, set(), 1)
    obj = child(2)
    cache.put(SERVICE, {**obj, "metadata": {**obj["metadata"], "managedFields": [{"manager": "kvasir-operator"}]}})
    assert cache.read(SERVICE, LLAMA) == [obj]


def test_a_pod_is_kept_without_its_containers() -> None:
    cache = InformerCache()
    cache.put(POD, child(1, spec={"nodeName": "n", "containers": [{"name": "engine"}]}, status={"phase": "Running"}))
    cache.finish_list(POD, None, {NamespacedName("models", "llama-engine")}, 1)
    [pod] = cache.read(POD, LLAMA) or []
    assert (pod["spec"], pod["status"]) == ({"nodeName": "n"}, {"phase": "Running"})


def test_a_version_alone_is_no_news_and_is_known() -> None:
    cache, obj = listed(child(1)), child(5)
    managed = {**obj, "metadata": {**obj["metadata"], "managedFields": [{"manager": "somebody"}]}}
    assert cache.put(SERVICE, managed) == set()
    assert cache.read(SERVICE, LLAMA) == [obj]  # what is written next is for this version


def test_what_controllers_report_of_children_without_pods_is_no_news() -> None:
    cache = InformerCache()
    cache.put(POD_DISRUPTION_BUDGET, child(1, spec={"maxUnavailable": 1}, status={"expectedPods": 1}))
    cache.finish_list(POD_DISRUPTION_BUDGET, None, {NamespacedName("models", "llama-engine")}, 1)
    counted = child(2, spec={"maxUnavailable": 1}, status={"expectedPods": 2})
    assert cache.put(POD_DISRUPTION_BUDGET, counted) == set()
    assert cache.put(POD_DISRUPTION_BUDGET, child(3, spec={"maxUnavailable": 2})) == {LLAMA}


def test_a_deployments_controller_numbers_it_which_is_no_news_and_other_annotations_are() -> None:
    cache, numbered = listed(child(1)), child(2)
    numbered["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "2"}
    cache.put(SERVICE, numbered)
    again, edited = child(3), child(4)
    again["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "3"}
    edited["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "3", "somebodys": "note"}
    assert [cache.put(SERVICE, again), cache.put(SERVICE, edited)] == [set(), {LLAMA}]


@pytest.mark.parametrize("kind", [DEPLOYMENT, STATEFUL_SET])
def test_of_a_workloads_status_only_what_passes_ask_of_it_is_news(kind: Kind) -> None:
    cache = InformerCache()
    counts = {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 1}
    available = {"type": "Available", "status": "False"}
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    cache.put(kind, child(1, status={**counts, "availableReplicas": 0, "conditions": [available]}))
    cache.finish_list(kind, None, {NamespacedName("models", "llama-engine")}, 1)
    assert cache.put(kind, child(2, status={**counts, "availableReplicas": 1, "conditions": []})) == set()
    for version, name in enumerate(counts, start=3):
        counts[name] += 1
        assert cache.put(kind, child(version, status=dict(counts))) == {LLAMA}, name
    assert cache.put(kind, child(9, status={**counts, "conditions": [available, refused]})) == {LLAMA}
    [workload] = cache.read(kind, LLAMA) or []
    assert workload["status"] == {**counts, "conditions": [refused]}


@pytest.mark.parametrize(
    ("metadata", "is_news"),
    [
        ({}, False),  # the status
        ({"labels": {"team": "a"}}, False),
        ({"generation": 4}, True),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, True),
        ({"uid": "another"}, True),
    ],
)
def test_only_what_changed_of_a_services_spec_is_news(metadata: dict[str, Any], is_news: bool) -> None:
    cache = InformerCache()
    assert cache.put(INFERENCE_SERVICE, service()) == {LLAMA}
    later = service(status={"phase": "Ready"})
    later["metadata"] |= {"resourceVersion": "10", **metadata}
    assert cache.put(INFERENCE_SERVICE, later) == ({LLAMA} if is_news else set())
    cache.finish_list(INFERENCE_SERVICE, None, {NamespacedName("models", "llama")}, 10)
    assert cache.read(INFERENCE_SERVICE, LLAMA) == [later]


def test_all_services_of_single_namespaces_are_not_those_of_the_cluster() -> None:
    cache = InformerCache(is_namespaced=True)
    cache.put(INFERENCE_SERVICE, service())
    assert cache.read_all(INFERENCE_SERVICE, "models") is None
    cache.finish_list(INFERENCE_SERVICE, "models", {NamespacedName("models", "llama")}, 9)
    assert cache.read_all(INFERENCE_SERVICE, "models") == [service()]
    assert cache.read_all(INFERENCE_SERVICE, None) is cache.read_all(INFERENCE_SERVICE, "elsewhere") is None
