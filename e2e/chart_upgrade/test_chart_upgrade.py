"""Verdict by traffic: what clients saw while `helm upgrade` replaced an earlier release, pods as before and changed."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.chart_upgrade.releases import NEW_FIELD, earlier_engine, previous_chart
from e2e.conftest import RIG_KUBECONFIG, VERSION, StartLoad, install_operator
from e2e.helm.helm import Helm
from e2e.live_cluster import KubectlError, LiveCluster, LiveService, deploy_service, revision_of
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from e2e.watch import watching

MANIFEST = Path(__file__).parent / "service.yaml"
WITH_NEW_FIELD = {"rollout": {"drainTimeout": "30s", NEW_FIELD: 0}}
EARLIER = earlier_engine(VERSION)


@pytest.fixture(scope="module")
def service(
    live_cluster: LiveCluster, live_helm: Helm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveService]:
    """Made under the earlier release; this one is installed again at the end, whatever happened."""
    previous = previous_chart(tmp_path_factory.mktemp("chart"))
    install_operator(live_helm, EARLIER, "--set=operator.workers=2", chart=previous)
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
        install_operator(live_helm, EARLIER)
        upgraded = time.time()
        deploy_service(service.cluster, MANIFEST, service.namespace, **WITH_NEW_FIELD)
        service.wait_ready()
        load.wait_streams(8)
        verdict = load.stop()
    verdicts.add("chart upgrade: pods as before", verdict, helm_upgrade=upgraded - started)
    assert not verdict.failures, verdict
    assert service.staying_uids("serve", "router") == before


def test_another_runtime_image_is_a_new_revision_that_rolls_out(
    service: LiveService, live_helm: Helm, start_load: StartLoad, verdicts: Verdicts
) -> None:
    [old], routers, engines = service.revisions(), service.staying_uids("router"), service.staying_uids("serve")
    old_image = image_of(service, old)
    with (
        start_load(service, answers(400), num_clients=4) as load,
        watching(service.cluster, "pods", service.namespace) as pods,
    ):
        started = time.time()
        install_operator(live_helm)
        replaced = pods.first(lambda state: not engines & state.keys(), 240, "the old engine to be gone", after=started)
        service.wait_ready()
        load.wait_streams(8)
        verdict = load.stop()
    longest = verdict.longest_stream_seconds
    verdicts.add("chart upgrade: another runtime image", verdict, replaced=replaced - started, longest_stream=longest)
    assert not verdict.failures, verdict
    [new] = service.revisions()  # the former one is not kept: what the first upgrade made known is acted on
    assert new != old
    assert {revision_of(pod) for pod in service.pods("serve")} == {new}
    assert old_image == f"{image_of(service, new)}-earlier"
    assert service.staying_uids("router") == routers


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


def image_of(service: LiveService, revision: str) -> str:
    [container] = service.revisions()[revision]["spec"]["template"]["spec"]["containers"]
    return str(container["image"])


def other_pull_policy(cluster: LiveCluster) -> str:
    """One that changes pods and can be met: the rig's nodes hold every image, another cluster's have a registry."""
    return "Never" if cluster.kubeconfig == RIG_KUBECONFIG else "Always"
