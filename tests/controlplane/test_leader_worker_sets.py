"""Groups of pods as LeaderWorkerSets, on a real API server with its controllers: StatefulSets and garbage collection.

Who makes StatefulSets of them is leader_worker_controller.py.
"""

from collections.abc import Iterable
from typing import Any

import yaml

from kvasir_operator.api.labels import GROUP_LABEL, RANK_LABEL, ROLE_LABEL
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, STATEFUL_SET, KubeObject
from kvasir_operator.observe.replicas import replicas_of
from kvasir_operator.observe.waiting import is_ready
from kvasir_operator.rollout.scale_down import ReadWork

from .conftest import LEADER_WORKER_SETS
from .control_plane import CRDS, ControlPlane
from .fake_node import path_of as path_of_pod
from .fake_node import report_failed
from .leader_worker_controller import leader_worker_sets, look_after_sets
from .processes import wait_until
from .reconciling import (
    Pass,
    conditions,
    current_revision,
    engine_pods,
    get_children,
    get_events,
    get_service,
    manifest,
    mark_engines_ready,
    no_work,
    path_of,
    revision_of_pod,
    run_pass,
)

PIPELINE = {"pipeline": 2}
NEW = {"device": "cpu", "maxNumSeqs": 8}
OFFERED = frozenset({LEADER_WORKER_SET})


def reconcile(control_plane: ControlPlane, namespace: str, read_work: ReadWork = no_work) -> Pass:
    """A pass of the operator, then a look of the controller of LeaderWorkerSets."""
    done = run_pass(control_plane, namespace, read_work=read_work, features=OFFERED)
    look_after_sets(control_plane, namespace)
    return done


def sets(control_plane: ControlPlane, namespace: str) -> dict[str, int]:
    """Replicas of the LeaderWorkerSets, by the end of their names."""
    found = leader_worker_sets(control_plane, namespace)
    return {each["metadata"]["name"].partition("-serve-")[2]: each["spec"]["replicas"] for each in found}


def own_stateful_sets(control_plane: ControlPlane, namespace: str) -> list[str]:
    """The operator's, and not those of LeaderWorkerSets."""
    return [key.name for key in get_children(control_plane, namespace) if key.kind == STATEFUL_SET]


def uids(pods: Iterable[KubeObject]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def settle(control_plane: ControlPlane, namespace: str, num_groups: int) -> list[KubeObject]:
    """Report pods ready, and run passes, until there are so many groups, all ready and of the current revision, and a
    pass writes nothing."""
    revision = current_revision(control_plane, namespace)

    def settled() -> list[KubeObject] | None:
        mark_engines_ready(control_plane, namespace)
        is_quiet = not reconcile(control_plane, namespace).writes
        pods = engine_pods(control_plane, namespace)
        is_whole = [revision_of_pod(pod) for pod in pods if is_ready(pod)] == 2 * num_groups * [revision]
        return pods if is_quiet and is_whole and len(pods) == 2 * num_groups else None

    return wait_until(settled, 60, f"{num_groups} groups to settle")


def serve(control_plane: ControlPlane, namespace: str, replicas: int = 2, **spec: Any) -> list[KubeObject]:
    """The pods of a service of groups, all ready."""
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, replicas=replicas, **spec))
    return settle(control_plane, namespace, replicas)


def of_group(pods: Iterable[KubeObject], index: int) -> tuple[KubeObject, KubeObject]:
    """Leader and worker."""
    own = [pod for pod in pods if pod["metadata"]["labels"][GROUP_LABEL].endswith(f"-{index}")]
    leader, worker = sorted(own, key=lambda pod: str(pod["metadata"]["labels"][RANK_LABEL]))
    return leader, worker


def test_a_replica_is_a_leader_worker_set_whose_leader_takes_the_requests(
    control_plane: ControlPlane, namespace: str
) -> None:
    pods = serve(control_plane, namespace)
    revision = current_revision(control_plane, namespace)
    assert sets(control_plane, namespace) == {f"{revision}-0": 1, f"{revision}-1": 1}
    assert own_stateful_sets(control_plane, namespace) == []
    ranks = {pod["metadata"]["name"].partition(revision)[2]: pod["metadata"]["labels"][RANK_LABEL] for pod in pods}
    assert ranks == {"-0-0": "0", "-0-0-1": "1", "-1-0": "0", "-1-0-1": "1"}
    status = get_service(control_plane, namespace)["status"]
    assert (status["ready"], status["replicas"]) == ("2/2", 2)
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def seen_by_routers() -> bool:
        items = control_plane.request("get", path, labelSelector=f"{ROLE_LABEL}=serve")["items"]
        names = [each["targetRef"]["name"].partition(revision)[2] for i in items for each in i.get("endpoints") or []]
        return sorted(names) == ["-0-0", "-1-0"]

    wait_until(seen_by_routers, 30, "the leaders of both groups, and no others, in the slices")


def test_a_worker_that_fails_has_its_whole_group_made_anew_and_that_once(
    control_plane: ControlPlane, namespace: str
) -> None:
    pods = serve(control_plane, namespace)
    struck = of_group(pods, 0)
    report_failed(control_plane, struck[1], "error: rank 1 is lost")
    writes = reconcile(control_plane, namespace).writes
    # The leader; garbage collection may be faster with the worker, whose deletion is then no write of ours.
    assert writes[:2] == [("patch", "LeaderWorkerSet"), ("delete", "Pod")]
    after = settle(control_plane, namespace, 2)
    assert not uids(struck) & uids(after)
    assert uids(of_group(pods, 1)) <= uids(after)
    restarts = [message for _, message in get_events(control_plane, namespace) if "made anew" in message]
    assert len(restarts) == 1
    assert conditions(get_service(control_plane, namespace))["Degraded"][0] == "False"


def test_a_worker_that_is_told_to_go_takes_its_group_along(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, replicas=1))
    leader, worker = of_group(start_on_slow_node(control_plane, namespace), 0)
    control_plane.request("delete", path_of_pod(worker))
    assert ("delete", "Pod") in reconcile(control_plane, namespace).writes
    assert engine_pods(control_plane, namespace) == []
    end_and_settle(control_plane, namespace, [leader, worker])


def test_a_leader_that_is_told_to_go_keeps_its_workers_until_it_has_gone(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, replicas=1))
    leader, worker = of_group(start_on_slow_node(control_plane, namespace), 0)
    control_plane.request("delete", path_of_pod(leader))
    assert ("delete", "Pod") not in reconcile(control_plane, namespace).writes
    assert uids(engine_pods(control_plane, namespace)) == uids([worker])
    end_and_settle(control_plane, namespace, [leader, worker])


def start_on_slow_node(control_plane: ControlPlane, namespace: str) -> list[KubeObject]:
    """The pods of one group, ready, that end when the test says so."""

    def made() -> bool:
        reconcile(control_plane, namespace)
        return len(engine_pods(control_plane, namespace)) == 2

    wait_until(made, 30, "the pods of a group")
    return control_plane.mark_pods_ready(namespace, GROUP_LABEL, 2, node="slow")


def end_and_settle(control_plane: ControlPlane, namespace: str, old: list[KubeObject]) -> None:
    """Let go of what is told to go, until the group is made anew; its new pods then stay."""

    def is_anew() -> bool:
        control_plane.end_terminating_pods(namespace)
        reconcile(control_plane, namespace)
        found = engine_pods(control_plane, namespace)
        return len(found) == 2 and not uids(found) & uids(old)

    wait_until(is_anew, 30, "both pods to be made anew")
    successors = uids(engine_pods(control_plane, namespace))
    assert uids(settle(control_plane, namespace, 1)) == successors


def test_the_least_busy_group_goes_with_all_of_its_pods(control_plane: ControlPlane, namespace: str) -> None:
    serve(control_plane, namespace)
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, replicas=1))

    async def first_is_idle(pods: Iterable[KubeObject]) -> dict[str, int]:
        return {name: load for load, name in enumerate(sorted(pod["metadata"]["name"] for pod in pods))}

    reconcile(control_plane, namespace, read_work=first_is_idle)
    assert list(sets(control_plane, namespace)) == [f"{current_revision(control_plane, namespace)}-1"]
    [replica] = replicas_of(settle(control_plane, namespace, 1))
    assert replica.is_ready


def test_groups_that_are_there_stay_until_their_revision_ends_and_come_back_as_they_were(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, replicas=1))
    run_pass(control_plane, namespace)  # before LeaderWorkerSets are offered
    settle(control_plane, namespace, 1)
    old = current_revision(control_plane, namespace)
    [of_old] = own_stateful_sets(control_plane, namespace)
    assert (old in of_old, sets(control_plane, namespace)) == (True, {})
    serve(control_plane, namespace, 1, engine=NEW)
    new = current_revision(control_plane, namespace)
    assert sets(control_plane, namespace) == {f"{new}-0": 1}
    pods = serve(control_plane, namespace, 1)
    assert {revision_of_pod(pod) for pod in pods} == {old}
    assert (own_stateful_sets(control_plane, namespace), sets(control_plane, namespace)) == ([of_old], {f"{new}-0": 0})


def test_where_the_crd_is_removed_stateful_sets_take_over(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(manifest(namespace, parallelism=PIPELINE, replicas=1))
    old = start_on_slow_node(control_plane, namespace)
    crd = yaml.safe_load(LEADER_WORKER_SETS.read_text())
    name = crd["metadata"]["name"]
    control_plane.request("delete", f"{CRDS}/{name}")
    try:
        wait_until(lambda: not control_plane.exists(path_of(LEADER_WORKER_SET, namespace)), 30, "the kind to go")
        run_pass(control_plane, namespace)
        status = get_service(control_plane, namespace)
        assert conditions(status)["Degraded"] == ("True", "LeaderWorkerSetsRemoved")

        def has_taken_over() -> bool:
            control_plane.end_terminating_pods(namespace)
            mark_engines_ready(control_plane, namespace)
            is_quiet = not run_pass(control_plane, namespace).writes
            pods = engine_pods(control_plane, namespace)
            return is_quiet and len(pods) == 2 and not uids(pods) & uids(old) and all(map(is_ready, pods))

        wait_until(has_taken_over, 60, "a StatefulSet's pods in place of the others")
        assert len(own_stateful_sets(control_plane, namespace)) == 1
        assert conditions(get_service(control_plane, namespace))["Degraded"][0] == "False"
    finally:
        control_plane.install_crd(crd)
