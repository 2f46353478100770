"""Replicas of several pods on a real API server: Kubernetes makes and removes the pods, the operator whole groups."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from kubernetes.dynamic.exceptions import NotFoundError

from kvasir_operator.api.labels import GROUP_LABEL, RANK_LABEL, ROLE_LABEL
from kvasir_operator.groups.record import RESTARTS
from kvasir_operator.groups.restart import RESTARTED_AT
from kvasir_operator.kube.kinds import SERVICE, STATEFUL_SET, KubeObject
from kvasir_operator.observe.replicas import replicas_of
from kvasir_operator.observe.waiting import is_ready

from .control_plane import ControlPlane
from .fake_node import MERGE_PATCH, NODE, bind_pod, report_failed
from .fake_node import path_of as path_of_pod
from .placements import placed
from .processes import wait_until
from .reconciling import (
    NAME,
    conditions,
    current_revision,
    engine_pods,
    get_children,
    get_events,
    get_service,
    manifest,
    mark_engines_ready,
    path_of,
    revision_of_pod,
    run_pass,
)

PIPELINE = {"pipeline": 2}
NEW = {"device": "cpu", "maxNumSeqs": 8}


def groups(control_plane: ControlPlane, namespace: str) -> dict[str, int]:
    """Pods that each group of the current revision is to have, by its index."""
    current = current_revision(control_plane, namespace)
    sizes = all_groups(control_plane, namespace)
    return {name.rpartition("-")[2]: size for name, size in sizes.items() if current in name}


def all_groups(control_plane: ControlPlane, namespace: str) -> dict[str, int]:
    """Those of former revisions too, by name."""
    children = get_children(control_plane, namespace)
    return {key.name: child["spec"]["replicas"] for key, child in children.items() if key.kind == STATEFUL_SET}


def uids(pods: Iterable[KubeObject]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def settle(control_plane: ControlPlane, namespace: str) -> None:
    """Report pods ready, and run passes, until all pods that are asked for are ready and a pass writes nothing."""

    def is_settled() -> bool:
        mark_engines_ready(control_plane, namespace)
        is_quiet = not run_pass(control_plane, namespace).writes
        pods = engine_pods(control_plane, namespace)
        return is_quiet and len(pods) == sum(all_groups(control_plane, namespace).values()) and all(map(is_ready, pods))

    wait_until(is_settled, 60, "the groups to settle")


def serve(control_plane: ControlPlane, namespace: str, **spec: Any) -> list[KubeObject]:
    """The pods of a service of groups, all ready."""
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, **spec))
    settle(control_plane, namespace)
    return engine_pods(control_plane, namespace)


def test_a_replica_is_a_group_whose_first_pod_takes_the_requests(control_plane: ControlPlane, namespace: str) -> None:
    pods = serve(control_plane, namespace)
    assert groups(control_plane, namespace) == {"0": 2, "1": 2}
    ranks = sorted((pod["metadata"]["labels"][GROUP_LABEL][-1], pod["metadata"]["labels"][RANK_LABEL]) for pod in pods)
    assert ranks == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    status = get_service(control_plane, namespace)["status"]
    assert (status["ready"], status["replicas"], status["phase"]) in [("2/2", 2, "Pending"), ("2/2", 2, "Scaling")]
    assert conditions(get_service(control_plane, namespace))["ModelLoaded"] == ("True", "ModelLoaded")

    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def seen_by_routers() -> bool:
        items = control_plane.request("get", path, labelSelector=f"{ROLE_LABEL}=serve")["items"]
        names = [each["targetRef"]["name"][-2:] for item in items for each in item.get("endpoints") or []]
        return sorted(names) == ["-0", "-0"]

    wait_until(seen_by_routers, 30, "the first pods of both groups, and no others, in the slices")


def test_a_second_pass_writes_nothing_and_a_deleted_group_comes_back(
    control_plane: ControlPlane, namespace: str
) -> None:
    serve(control_plane, namespace, replicas=1)
    assert run_pass(control_plane, namespace).writes == []
    [name] = [key.name for key in get_children(control_plane, namespace) if key.kind == STATEFUL_SET]
    control_plane.request("delete", f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}")
    wait_until(lambda: groups(control_plane, namespace) == {}, 30, "the group to go")
    assert ("apply", "StatefulSet") in run_pass(control_plane, namespace).writes
    assert len(groups(control_plane, namespace)) == 1


def test_the_least_busy_group_goes_with_all_of_its_pods(control_plane: ControlPlane, namespace: str) -> None:
    serve(control_plane, namespace)
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, replicas=1))

    async def first_is_idle(pods: Iterable[KubeObject]) -> dict[str, int]:
        names = sorted(pod["metadata"]["name"] for pod in pods)
        assert [name[-4:] for name in names] == ["-0-0", "-1-0"], "only first pods are asked"
        return {name: load for load, name in enumerate(names)}

    run_pass(control_plane, namespace, read_work=first_is_idle)
    assert groups(control_plane, namespace) == {"1": 2}
    wait_until(lambda: len(engine_pods(control_plane, namespace)) == 2, 30, "the pods of one group to go")
    settle(control_plane, namespace)
    assert [each.is_ready for each in replicas_of(engine_pods(control_plane, namespace))] == [True]


def test_a_new_spec_replaces_group_by_group_and_a_rollback_brings_them_back(
    control_plane: ControlPlane, namespace: str
) -> None:
    serve(control_plane, namespace)
    old = current_revision(control_plane, namespace)
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, engine=NEW))

    def is_done() -> bool:
        with suppress(NotFoundError):
            mark_engines_ready(control_plane, namespace)
        ready = [each for each in replicas_of(engine_pods(control_plane, namespace)) if each.is_ready]
        assert len(ready) >= 2
        run_pass(control_plane, namespace)
        revisions = {revision_of_pod(pod) for pod in engine_pods(control_plane, namespace)}
        assert len(replicas_of(engine_pods(control_plane, namespace))) <= 3
        return revisions == {current_revision(control_plane, namespace)}

    wait_until(is_done, 60, "the rollout to end")
    settle(control_plane, namespace)
    sets = [key.name for key in get_children(control_plane, namespace) if key.kind == STATEFUL_SET]
    assert sorted(name for name in sets if old in name) == [f"{NAME}-serve-{old}-{index}" for index in (0, 1)]
    names = {key.name for key in get_children(control_plane, namespace) if key.kind == SERVICE}
    assert names == {
        f"{NAME}-router",
        f"{NAME}-router-peers",
        f"{NAME}-serve-ranks",
        f"{NAME}-serve-{current_revision(control_plane, namespace)}",
    }
    serve(control_plane, namespace)
    assert {revision_of_pod(pod) for pod in engine_pods(control_plane, namespace)} == {old}


def ready_groups(control_plane: ControlPlane, namespace: str) -> Counter[str]:
    """By revision."""
    replicas = replicas_of(engine_pods(control_plane, namespace))
    return Counter(revision_of_pod(each.pods[0]) for each in replicas if each.is_ready)


def roll_to(control_plane: ControlPlane, namespace: str, *revisions: str, **spec: Any) -> None:
    """Until so many groups of these revisions are ready and a pass writes nothing; all the while whole ones are."""
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, **spec))

    def is_there() -> bool:
        mark_engines_ready(control_plane, namespace)
        assert ready_groups(control_plane, namespace).total() >= 2
        run_pass(control_plane, namespace)
        assert set(all_groups(control_plane, namespace).values()) <= {0, 2}
        return ready_groups(control_plane, namespace) == Counter(revisions)

    wait_until(is_there, 60, f"ready groups of {revisions}")
    settle(control_plane, namespace)
    assert ready_groups(control_plane, namespace) == Counter(revisions)


def test_a_canary_is_a_whole_group_with_its_weight_until_it_is_taken_back_or_let_go_on(
    control_plane: ControlPlane, namespace: str
) -> None:
    def wait_placed(expected: dict[str, int]) -> None:
        of_decodes = {(revision,): number for revision, number in expected.items()}
        wait_until(lambda: placed(control_plane, namespace, 20) == of_decodes, 30, f"{expected} of 20 requests")

    serve(control_plane, namespace)
    old = current_revision(control_plane, namespace)
    held, let_go = ({"rollout": {"canary": {"weight": 10, "pause": pause}}} for pause in (True, False))
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, engine=NEW, **held))
    new = current_revision(control_plane, namespace)
    roll_to(control_plane, namespace, old, old, new, engine=NEW, **held)
    assert conditions(get_service(control_plane, namespace))["Progressing"] == ("False", "RolloutPaused")
    wait_placed({old: 18, new: 2})
    roll_to(control_plane, namespace, old, old)
    wait_placed({old: 20})
    roll_to(control_plane, namespace, old, old, new, engine=NEW, **held)
    wait_placed({old: 18, new: 2})
    roll_to(control_plane, namespace, new, new, engine=NEW, **let_go)
    wait_placed({new: 20})
    roll_to(control_plane, namespace, old, old)
    wait_placed({old: 20})


def test_a_pod_that_fails_has_its_whole_group_made_anew(control_plane: ControlPlane, namespace: str) -> None:
    pods = serve(control_plane, namespace)
    struck = [pod for pod in pods if pod["metadata"]["labels"][GROUP_LABEL].endswith("-0")]
    report_failed(control_plane, struck[1], "error: rank 1 is lost")
    assert run_pass(control_plane, namespace).writes[:3] == [
        ("patch", "StatefulSet"),
        ("delete", "Pod"),
        ("delete", "Pod"),
    ]
    wait_until(
        lambda: (
            len(engine_pods(control_plane, namespace)) == 4
            and not uids(struck) & uids(engine_pods(control_plane, namespace))
        ),
        30,
        "both pods of the group to be made anew",
    )
    others = uids(pods) - uids(struck)
    assert others <= uids(engine_pods(control_plane, namespace))
    run_pass(control_plane, namespace)
    found = get_service(control_plane, namespace)
    assert conditions(found)["Degraded"] == ("True", "GroupRestarted")
    assert "GroupRestarted" in [reason for reason, _ in get_events(control_plane, namespace)]
    sets = [child for key, child in get_children(control_plane, namespace).items() if key.kind == STATEFUL_SET]
    assert sum(RESTARTS in each["metadata"]["annotations"] for each in sets) == 1
    settle(control_plane, namespace)
    assert conditions(get_service(control_plane, namespace))["Degraded"][0] == "False"


def test_a_pod_that_is_told_to_go_takes_its_group_along(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, replicas=1))
    run_pass(control_plane, namespace)
    pods = control_plane.mark_pods_ready(namespace, GROUP_LABEL, 2, node="slow")  # its pods end when this test says so
    control_plane.request("delete", path_of_pod(pods[1]))
    assert ("delete", "Pod") in run_pass(control_plane, namespace).writes
    assert engine_pods(control_plane, namespace) == []
    assert ("delete", "Pod") not in run_pass(control_plane, namespace).writes
    control_plane.end_terminating_pods(namespace)
    control_plane.wait_for_pods(namespace, GROUP_LABEL, 2)
    assert not uids(pods) & uids(engine_pods(control_plane, namespace))


def test_a_rollout_restart_makes_all_groups_anew_one_after_the_other(
    control_plane: ControlPlane, namespace: str
) -> None:
    pods = serve(control_plane, namespace)
    template = {"metadata": {"annotations": {RESTARTED_AT: "2026-11-26T10:00:00Z"}}}
    for name in all_groups(control_plane, namespace):
        path = path_of(STATEFUL_SET, namespace, name)
        control_plane.request("patch", path, {"spec": {"template": template}}, MERGE_PATCH)

    def are_new() -> bool:
        mark_engines_ready(control_plane, namespace)
        assert ready_groups(control_plane, namespace).total() >= 1
        run_pass(control_plane, namespace)
        return not uids(pods) & uids(engine_pods(control_plane, namespace))

    wait_until(are_new, 60, "all pods to be made anew")
    settle(control_plane, namespace)
    assert len(engine_pods(control_plane, namespace)) == 4


def report_unschedulable(control_plane: ControlPlane, pod: KubeObject) -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    status = {"status": {"conditions": [unscheduled]}}
    control_plane.request("patch", f"{path_of_pod(pod)}/status", status, MERGE_PATCH)


def test_groups_that_hold_a_part_of_their_room_each_give_way_to_one(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(manifest(namespace, parallelism=PIPELINE))
    run_pass(control_plane, namespace)
    pods = sorted(control_plane.wait_for_pods(namespace, GROUP_LABEL, 4), key=lambda pod: pod["metadata"]["name"])
    for first, second in (pods[:2], pods[2:]):
        bind_pod(control_plane, first, NODE)
        report_unschedulable(control_plane, second)
    run_pass(control_plane, namespace)
    assert groups(control_plane, namespace) == {"0": 2}
    wait_until(lambda: len(engine_pods(control_plane, namespace)) == 2, 30, "the pods of one group to go")
    assert "StatefulSet" not in [kind for _, kind in run_pass(control_plane, namespace).writes]
    settle(control_plane, namespace)
    assert groups(control_plane, namespace) == {"0": 2, "1": 2}


def test_at_zero_there_is_no_group_and_the_service_is_idle(control_plane: ControlPlane, namespace: str) -> None:
    serve(control_plane, namespace, replicas=1)
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, replicas=0))
    run_pass(control_plane, namespace)
    assert groups(control_plane, namespace) == {}
    wait_until(lambda: not engine_pods(control_plane, namespace), 30, "the pods to go")
    run_pass(control_plane, namespace)
    status = get_service(control_plane, namespace)["status"]
    assert next((each["role"], each["desired"], each["ready"]) for each in status["roles"]) == ("serve", 0, 0)
    assert conditions({"status": status})["ModelLoaded"] == ("False", "Idle")
