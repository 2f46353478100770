"""Workloads as they are read from Deployments, Services and pods."""

from typing import Any

from tests.operator.cluster_objects import (
    NOW,
    child,
    deployment,
    leader_worker_set,
    member,
    owner,
    pod,
    stateful_set,
    stored,
    waiting_container,
)

from kvasir_operator.api.labels import REVISION_LABEL, REVISION_NUMBER, ROLE_LABEL, SERVICE_LABEL, TRAFFIC_WEIGHT
from kvasir_operator.apply.plan import stamped
from kvasir_operator.groups.record import RESTARTS, RestartRecord
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.observe.observe import Observed
from kvasir_operator.rollout.observed import observe_workloads
from kvasir_operator.rollout.workload import Workload, WorkloadKey

LATER = "2026-11-20T12:00:01Z"


def engines(revision: str, replicas: int = 2, number: int = 1) -> KubeObject:
    """A revision's Deployment."""
    obj = stored(deployment(replicas=replicas, revision=revision), uid=f"uid-{revision}")
    obj["metadata"] |= {"name": f"llama-serve-{revision}", "ownerReferences": [owner()]}
    obj["metadata"]["annotations"] = {REVISION_NUMBER: str(number)}
    match = {SERVICE_LABEL: "llama", ROLE_LABEL: "serve", REVISION_LABEL: revision}
    obj["spec"] |= {"selector": {"matchLabels": match}, "progressDeadlineSeconds": 7200}
    return obj


def headless(revision: str, **more_labels: str) -> KubeObject:
    obj = child("Service", f"llama-serve-{revision}")
    obj["metadata"]["labels"] |= more_labels
    return stored(stamped(obj))


def engine(name: str, revision: str, **fields: Any) -> KubeObject:
    obj = pod(name, **fields)
    obj["metadata"]["labels"][REVISION_LABEL] = revision
    return obj


def seen(children: list[KubeObject], pods: list[KubeObject] | None = None, now: str = NOW) -> dict[str, Workload]:
    """By revision."""
    found = observe_workloads(Observed(tuple(children), tuple(pods or [])), "uid-1", now)
    return {each.workload.key.revision: each.workload for each in found}


def loading(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "engine", "state": {"running": {}}, "ready": False, "restartCount": 0, **fields}]


def test_counts_each_revisions_pods() -> None:
    pods = [
        engine("a1", "a"),
        engine("a2", "a", ready=False, containerStatuses=loading()),
        engine("a3", "a", leaving=True),
        engine("a4", "a", ready=False, phase="Failed"),
        engine("b1", "b"),
        pod("router", "router"),
    ]
    found = seen([engines("a"), headless("a"), engines("b", 1, number=2), headless("b")], pods)
    key = WorkloadKey("serve", "a")
    assert found["a"] == Workload(key, 1, replicas=2, num_pods=2, num_ready=1, num_useless=1, num_leaving=1)
    assert (found["b"].number, found["b"].replicas, found["b"].num_ready) == (2, 1, 1)


def test_pods_that_no_service_shows_to_a_router_do_not_serve() -> None:
    found = seen([engines("a")], [engine("a1", "a")])["a"]
    assert (found.num_pods, found.num_ready) == (1, 0)


def test_a_services_weight_is_its_revisions() -> None:
    assert seen([engines("a"), headless("a", **{TRAFFIC_WEIGHT: "10"})])["a"].traffic_weight == 10
    assert seen([engines("a"), headless("a", **{TRAFFIC_WEIGHT: "much"})])["a"].traffic_weight is None


def test_a_canary_whose_label_somebody_took_away_or_changed_keeps_its_weight() -> None:
    for given in ({}, {TRAFFIC_WEIGHT: "90"}, {TRAFFIC_WEIGHT: "much"}):
        service = headless("a", **given)
        service["metadata"]["annotations"][TRAFFIC_WEIGHT] = "10"
        assert seen([engines("a"), service])["a"].traffic_weight == 10


def test_a_weight_that_was_taken_off_is_none_of_the_requests_and_not_no_weight() -> None:
    without_its_weight = headless("a")
    without_its_weight["metadata"]["annotations"] = {}
    assert seen([engines("a"), without_its_weight])["a"].traffic_weight == 0


def test_somebody_elses_deployments_and_those_without_engines_are_no_workloads() -> None:
    theirs = engines("a")
    theirs["metadata"]["ownerReferences"] = [owner(uid="another")]
    router = stored({**engines("b"), "metadata": {**engines("b")["metadata"], "name": "llama-router"}})
    router["spec"]["template"]["metadata"]["labels"] = {ROLE_LABEL: "router"}
    assert seen([theirs, router]) == {}


def test_a_workload_is_known_by_its_template_whatever_its_labels_say() -> None:
    obj = engines("a")
    obj["metadata"]["labels"] = {}
    assert set(seen([obj])) == {"a"}


def test_a_pod_that_fails_or_was_never_ready_is_useless() -> None:
    crashing = engine("c", "a", ready=False, containerStatuses=[waiting_container("CrashLoopBackOff", restartCount=4)])
    unscheduled = engine("u", "a", ready=False, containerStatuses=[])
    assert seen([engines("a")], [crashing, unscheduled])["a"].num_useless == 2


def test_a_pod_is_judged_by_its_own_containers_and_not_by_a_sidecar() -> None:
    proxy = {"name": "istio-proxy", "state": {"running": {}}, "restartCount": 2}
    up = {"running": {"startedAt": "2026"}}
    was_ready = engine("r", "a", ready=False, containerStatuses=[*loading(state=up), proxy])
    crashing_proxy = waiting_container("CrashLoopBackOff", restartCount=4, name="istio-proxy")
    beside = engine("b", "a", ready=False, containerStatuses=[*loading(state=up, ready=True), crashing_proxy])
    for each in (was_ready, beside):
        each["status"]["conditions"][0]["lastTransitionTime"] = NOW
        each["status"]["initContainerStatuses"] = [proxy]
        each["spec"]["initContainers"] = [{"name": "istio-proxy", "restartPolicy": "Always"}]
    never_ready = engine("n", "a", ready=False, containerStatuses=[*loading(), proxy])
    assert seen([engines("a")], [was_ready, beside, never_ready])["a"].num_useless == 1


def test_a_pod_is_unbound_while_no_node_has_it_and_a_group_while_none_has_any_of_its_pods() -> None:
    bound, unbound = (engine(name, "a", ready=False, containerStatuses=[]) for name in ("b", "u"))
    unbound["spec"] = {}
    assert seen([engines("a")], [bound, unbound])["a"].num_unbound == 1
    group = stateful_set(revision="a")
    for num_bound, expected in ((0, 1), (1, 0)):
        ranks = [member(rank, group, ready=False) for rank in range(2)]
        for rank in ranks[num_bound:]:
            rank["spec"] = {}
        assert seen([group], ranks)["a"].num_unbound == expected


def test_a_pod_that_may_be_ready_again_is_not() -> None:
    was_ready = engine("r", "a", ready=False, containerStatuses=loading(state={"running": {"startedAt": "2026"}}))
    was_ready["status"]["conditions"][0]["lastTransitionTime"] = NOW
    restarted = engine("s", "a", ready=False, containerStatuses=loading(restartCount=1))
    gone_quiet = engine("q", "a", ready=False, containerStatuses=loading(ready=True))
    found = seen([engines("a")], [was_ready, restarted, gone_quiet, engine("ok", "a")])["a"]
    assert found.num_useless == 0


def test_trouble_is_what_waiting_seldom_mends() -> None:
    waits = engine("w", "a", ready=False, containerStatuses=loading())
    fails = engine("f", "a", ready=False, containerStatuses=[waiting_container("ErrImagePull", "no such image")])
    assert seen([engines("a")], [waits])["a"].trouble is None
    trouble = seen([engines("a")], [engine("ok", "a"), waits, fails])["a"].trouble
    assert trouble == "pod f: container engine: ErrImagePull: no such image"


def test_a_deployment_that_may_not_make_pods_is_in_trouble() -> None:
    refused = engines("a")
    refused["status"] = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]}
    assert "exceeded quota" in (seen([refused])["a"].trouble or "")
    refused["spec"]["replicas"] = 0
    assert seen([refused])["a"].trouble is None


def test_no_ready_pod_within_the_deadline_is_trouble() -> None:
    waits = engine("w", "a", ready=False, containerStatuses=loading())
    assert seen([engines("a"), headless("a")], [waits], "2026-11-20T12:00:00Z")["a"].trouble is None
    trouble = seen([engines("a"), headless("a")], [waits], LATER)["a"].trouble
    assert trouble == "llama-serve-a: no pod became ready within 7200 s"
    assert seen([engines("a"), headless("a")], [waits, engine("ok", "a")], LATER)["a"].trouble is None


def test_groups_of_a_revision_are_one_workload_whose_replicas_they_are() -> None:
    sets = [stateful_set(0, "a"), stateful_set(1, "a"), stateful_set(2, "a", is_running=False)]
    pods = [
        member(0, sets[0]),
        member(1, sets[0], ready=False),
        member(0, sets[1], ready=False, containerStatuses=loading()),
        member(1, sets[1]),
        member(0, sets[2], leaving=True),
        member(1, sets[2], leaving=True),
    ]
    found = seen([*sets, headless("a")], pods)["a"]
    key = WorkloadKey("serve", "a")
    assert found == Workload(key, 1, replicas=2, num_pods=2, num_ready=1, num_useless=1, num_leaving=1)


def test_a_statefulset_of_somebody_elses_is_no_group() -> None:
    theirs = stateful_set(0, "a")
    theirs["metadata"]["name"] = "benchmark"
    assert seen([theirs]) == {}


def test_a_group_that_is_restarted_again_and_again_is_in_trouble() -> None:
    record = RestartRecord(1, NOW, "pod p: it ended", {})
    group = stateful_set(0, "a", **{RESTARTS: record.text()})
    pods = [member(0, group, ready=False, containerStatuses=loading()), member(1, group)]
    assert "pod p: it ended" in (seen([group, headless("a")], pods)["a"].trouble or "")
    assert seen([group, headless("a")], [member(0, group), member(1, group)])["a"].trouble is None


def test_groups_too_have_to_be_ready_within_the_time_of_their_startup_probe() -> None:
    group = stateful_set(0, "a")
    waits = [member(rank, group, ready=False, containerStatuses=loading()) for rank in (0, 1)]
    assert seen([group, headless("a")], waits, "2026-11-20T12:00:00Z")["a"].trouble is None
    trouble = seen([group, headless("a")], waits, LATER)["a"].trouble
    assert trouble == "llama-serve-a: no pod became ready within 7200 s"


def test_leader_worker_sets_of_a_revision_are_one_workload_too() -> None:
    sets = [leader_worker_set(0, "a"), leader_worker_set(1, "a", is_running=False)]
    pods = [member(0, sets[0]), member(1, sets[0]), member(0, sets[1], leaving=True), member(1, sets[1])]
    found = seen([*sets, headless("a")], pods)["a"]
    assert found == Workload(WorkloadKey("serve", "a"), 1, replicas=1, num_pods=1, num_ready=1, num_leaving=1)


def test_a_leader_worker_set_takes_no_pods_of_other_revisions() -> None:
    assert seen([leader_worker_set(0, "a"), headless("a")], [engine("other", "b")])["a"].num_pods == 0


def test_a_download_may_take_longer_than_an_engine_may() -> None:
    loader = {"name": "model-loader", "state": {"running": {}}}
    waits = engine("w", "a", ready=False, containerStatuses=loading(), initContainerStatuses=[loader])
    assert seen([engines("a"), headless("a")], [waits], LATER)["a"].trouble is None
    loader["state"] = {"terminated": {"exitCode": 0, "finishedAt": LATER}}
    assert seen([engines("a"), headless("a")], [waits], LATER)["a"].trouble is None
    loader["state"] = {"terminated": {"exitCode": 0, "finishedAt": NOW}}
    assert seen([engines("a"), headless("a")], [waits], LATER)["a"].trouble is not None
