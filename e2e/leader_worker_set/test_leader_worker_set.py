"""Verdict by traffic: groups that LeaderWorkerSet's own controller makes are struck, updated, scaled and deleted."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from e2e.conftest import StartLoad, install_operator, rig_cluster
from e2e.engine_processes import signalling
from e2e.engines import telling_to_go
from e2e.helm.helm import Helm, helm_program
from e2e.leader_worker_set.controller import leader_worker_sets
from e2e.leader_worker_set.module import controller_program
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveCluster, LiveService, deploy_service
from e2e.pod_groups import NUM_GROUPS, NUM_NODES, scale_groups, strike_a_group, update_groups
from e2e.verdicts import Verdicts
from tests.controlplane.processes import wait_until

SCENARIO = "LeaderWorkerSet"
MANIFEST = Path(__file__).parent / "service.yaml"
RANKS = pytest.mark.parametrize("rank", ["0", "1"], ids=["the leader", "the worker"])

pytestmark = pytest.mark.timeout(600, func_only=True)


@pytest.fixture(scope="module")
def cluster(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """The rig with LeaderWorkerSet, for this module: to the other scenarios groups are StatefulSets."""
    if os.environ.get("KUBECONFIG") is not None:
        pytest.skip("starts a cluster of its own: unset KUBECONFIG")
    controller_program()
    with (
        rig_cluster(pytestconfig) as cluster,
        leader_worker_sets(cluster, tmp_path_factory.mktemp("leader-worker-set")),
    ):
        yield cluster


@pytest.fixture(scope="module")
def service(cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    install_operator(Helm(helm_program(), tmp_path_factory.mktemp("helm-home"), cluster.kubeconfig))
    with cluster.namespace("leader-worker-set") as namespace:
        service = deploy_service(cluster, MANIFEST, namespace)
        service.wait_ready()
        yield service


def test_each_replica_is_a_leader_worker_set_of_one_group_and_becomes_ready(service: LiveService) -> None:
    found = objects(service, "leaderworkersets")
    sizes = [(each["spec"]["replicas"], each["spec"]["leaderWorkerTemplate"]["size"]) for each in found]

    assert sizes == [(1, NUM_NODES)] * NUM_GROUPS
    wait_until_reported(service)
    owners = {each["metadata"]["ownerReferences"][0]["kind"] for each in objects(service, "statefulsets")}
    assert owners == {"LeaderWorkerSet", "Pod"}


@RANKS
def test_streams_outlive_a_pod_of_their_group_and_it_is_made_anew_as_a_whole(
    rank: str, service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    strike_a_group(
        f"{SCENARIO}: SIGKILL of rank {rank}", rank, signalling(signal.SIGKILL), service, start_load, verdicts
    )


@RANKS
def test_a_pod_that_is_told_to_go_takes_its_group_along_and_no_stream(
    rank: str, service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    strike_a_group(f"{SCENARIO}: rank {rank} drained", rank, telling_to_go(service), service, start_load, verdicts)


def test_an_update_replaces_whole_groups(service: LiveService, start_load: StartLoad, verdicts: Verdicts) -> None:
    update_groups(SCENARIO, service, start_load, verdicts)
    wait_until_reported(service)


def test_fewer_replicas_take_a_whole_group_along_and_no_stream(
    service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    scale_groups(SCENARIO, service, start_load, verdicts)


def test_a_deleted_service_leaves_nothing_behind(service: LiveService) -> None:
    service.delete()
    for kind in ("leaderworkersets", "statefulsets", "pods", "services"):
        wait_until(partial(has_no, service, kind), 120, f"all {kind} to go", POLL_SECONDS)


def has_no(service: LiveService, kind: str) -> bool:
    return not objects(service, kind)


def objects(service: LiveService, kind: str) -> list[KubeObject]:
    """All of its namespace."""
    return service.cluster.list(kind, service.namespace)


def wait_until_reported(service: LiveService) -> None:
    """LeaderWorkerSet's own status is behind the pods."""
    wait_until(lambda: all_report_ready(service), 60, "LeaderWorkerSets to report their groups ready", POLL_SECONDS)


def all_report_ready(service: LiveService) -> bool:
    """The one group of each that is not kept for a rollback."""
    running = [each for each in objects(service, "leaderworkersets") if each["spec"]["replicas"]]
    counts = [each.get("status", {}) for each in running]
    return all(each.get("readyReplicas") == each.get("updatedReplicas") == each.get("replicas") == 1 for each in counts)
