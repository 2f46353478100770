"""Verdict by traffic: what clients saw while `helm upgrade` replaced an earlier release, pods as before and changed."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.chart_upgrade.releases import NEW_FIELD, previous_chart
from e2e.conftest import RIG_KUBECONFIG, StartLoad, install_operator
from e2e.helm.helm import Helm
from e2e.live_cluster import KubectlError, KubeObject, LiveCluster, LiveService, deploy_service
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from e2e.watch import watching

MANIFEST = Path(__file__).parent / "service.yaml"
WITH_NEW_FIELD = {"rollout": {"drainTimeout": "30s", NEW_FIELD: 2}}


@pytest.fixture(scope="module")
def service(
    live_cluster: LiveCluster, live_helm: Helm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveService]:
    """Made under the earlier release; this one is installed again at the end, whatever happened."""
    previous = previous_chart(tmp_path_factory.mktemp("chart"))
    install_operator(live_helm, "--set=operator.workers=2", chart=previous)
    try:
        with live_cluster.namespace("chart-upgrade") as namespace:
            live = deploy_service(live_cluster, MANIFEST, namespace)
            live.wait_ready()
            yield live
    finally:
        install_operator(live_helm)


def test_an_upgrade_brings_the_new_crd_and_leaves_the_pods_alone(
    service: LiveService, live_helm: Helm, start_load: StartLoad, verdicts: Verdicts
) -> None:
    before = service.staying_uids("serve", "router")
    with pytest.raises(KubectlError, match=f"unknown field.*{NEW_FIELD}"):
        deploy_service(service.cluster, MANIFEST, service.namespace, **WITH_NEW_FIELD)
    with start_load(service, answers(200), num_clients=4) as load:
        started = time.time()
        install_operator(live_helm)
        upgraded = time.time()
        deploy_service(service.cluster, MANIFEST, service.namespace, **WITH_NEW_FIELD)
        service.wait_ready()
        load.wait_streams(8)
        verdict = load.stop()
    verdicts.add("chart upgrade: pods as before", verdict, helm_upgrade=upgraded - started)
    assert not verdict.failures, verdict
    assert service.staying_uids("serve", "router") == before
    assert rolling_update(service)[NEW_FIELD] == 2, "the new field is acted on"


def test_an_upgrade_that_changes_every_pod_replaces_them_under_load(
    service: LiveService, live_helm: Helm, start_load: StartLoad, verdicts: Verdicts
) -> None:
    before = service.staying_uids("serve", "router")
    with (
        start_load(service, answers(400), num_clients=4) as load,
        watching(service.cluster, "pods", service.namespace) as pods,
    ):
        started = time.time()
        install_operator(live_helm, f"--set=images.pullPolicy={other_pull_policy(service.cluster)}")
        replaced = pods.first(lambda state: not before & state.keys(), 240, "every old pod to be gone", after=started)
        service.wait_ready()
        load.wait_streams(8)
        verdict = load.stop()
    longest = verdict.longest_stream_seconds
    verdicts.add("chart upgrade: pods changed", verdict, every_pod_replaced=replaced - started, longest_stream=longest)
    assert not verdict.failures, verdict


def rolling_update(service: LiveService) -> KubeObject:
    deployment = service.cluster.get("deployment", f"{service.name}-engine", service.namespace) or {}
    strategy: KubeObject = deployment["spec"]["strategy"]["rollingUpdate"]
    return strategy


def other_pull_policy(cluster: LiveCluster) -> str:
    """One that changes pods and can be met: the rig's nodes hold every image, another cluster's have a registry."""
    return "Never" if cluster.kubeconfig == RIG_KUBECONFIG else "Always"
