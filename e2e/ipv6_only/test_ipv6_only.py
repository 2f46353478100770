"""Verdict by traffic on a cluster without IPv4: install, serve, update and scale down, none of which may need it."""

import ipaddress
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.conftest import StartLoad, install_operator, rig_cluster
from e2e.helm.helm import Helm, helm_program
from e2e.live_cluster import POLL_SECONDS, LiveCluster, LiveService, deploy_service
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from tests.controlplane.processes import wait_until

MANIFEST = Path(__file__).parent / "service.yaml"

pytestmark = pytest.mark.timeout(600, func_only=True)


@pytest.fixture(scope="module")
def ipv6_cluster(pytestconfig: pytest.Config) -> Iterator[LiveCluster]:
    """The rig in IPv6 alone, for this module."""
    if os.environ.get("KUBECONFIG") is not None:
        pytest.skip("starts a cluster of its own: unset KUBECONFIG")
    with rig_cluster(pytestconfig, "--nodes=2", "--ip-family=ipv6") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def service(ipv6_cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    install_operator(Helm(helm_program(), tmp_path_factory.mktemp("helm-home"), ipv6_cluster.kubeconfig))
    with ipv6_cluster.namespace("ipv6-only") as namespace:
        service = deploy_service(ipv6_cluster, MANIFEST, namespace)
        service.wait_ready()
        yield service


def test_a_cluster_without_ipv4_serves_updates_and_scales(
    service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    assert address_families(service) == {6}
    old = service.staying_uids("serve")
    with start_load(service, answers(400), num_clients=4) as load:
        changed = time.monotonic()
        service.patch({"engine": {"maxNumSeqs": 24}})
        wait_until(lambda: not old & service.staying_uids("serve"), 120, "both engines to be replaced", POLL_SECONDS)
        service.wait_ready()
        updated = time.monotonic()
        service.patch({"replicas": 1})
        wait_until(lambda: len(service.pods("serve")) == 1, 60, "an engine to go", POLL_SECONDS)
        scaled = time.monotonic()
        service.wait_ready()
        load.wait_streams(4)
        verdict = load.stop()
    verdicts.add("IPv6 only", verdict, update=updated - changed, scale_down=scaled - updated)
    assert not verdict.failures, verdict


def address_families(service: LiveService) -> set[int]:
    """Of every address that pods and Services of all namespaces have."""
    pods, services = (service.cluster.list(kind, namespace=None) for kind in ("pods", "services"))
    addresses = [each["ip"] for pod in pods for each in pod["status"].get("podIPs", [])]
    addresses += [ip for obj in services for ip in obj["spec"].get("clusterIPs", []) if ip != "None"]
    return {ipaddress.ip_address(address).version for address in addresses}
