"""A control plane without Kvasir's CRDs, and a helm that has installed nothing in it."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e.cluster.rig.prometheus_crds import prometheus_crds
from e2e.helm.helm import CHART, Helm, helm_program
from kubernetes.dynamic.exceptions import NotFoundError
from tests.controlplane.control_plane import CRDS, ControlPlane, running_control_plane
from tests.controlplane.processes import wait_until
from tests.controlplane.programs import program_directory

KVASIR_CRDS = [yaml.safe_load(path.read_text())["metadata"]["name"] for path in (CHART / "files" / "crds").iterdir()]
NAMESPACES = (f"helm-{number}" for number in itertools.count(1))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with running_control_plane(program_directory(has_nodes=True), tmp_path_factory.mktemp("control-plane")) as running:
        yield running


@pytest.fixture
def namespace(cluster: ControlPlane) -> Iterator[str]:
    """A namespace that admits pods under the strictest of Kubernetes' own standards only."""
    name = next(NAMESPACES)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.create_namespace(name)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield name
    cluster.delete_namespace(name)


@pytest.fixture
def other_namespace(cluster: ControlPlane) -> Iterator[str]:
    name = next(NAMESPACES)
    cluster.create_namespace(name)
    yield name
    cluster.delete_namespace(name)


@pytest.fixture(scope="session")
def offline_helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(helm_program(), tmp_path_factory.mktemp("home"))


@pytest.fixture
def helm(cluster: ControlPlane, namespace: str, other_namespace: str, tmp_path: Path) -> Iterator[Helm]:
    """Uninstalls at the end what the test installed, the CRDs too, before its namespaces go."""
    helm = Helm(helm_program(), tmp_path, cluster.kubeconfig)
    yield helm
    for release in helm.releases():
        helm.uninstall(release["namespace"])
    for name in KVASIR_CRDS:
        delete_crd(cluster, name)


@pytest.fixture
def monitoring_crds(cluster: ControlPlane) -> Iterator[None]:
    """PodMonitor, ServiceMonitor and PrometheusRule, as the Prometheus operator installs them."""
    crds = [yaml.safe_load(path.read_text()) for path in prometheus_crds()]
    for crd in crds:
        cluster.install_crd(crd)
    yield
    for crd in crds:
        delete_crd(cluster, crd["metadata"]["name"])


def delete_crd(cluster: ControlPlane, name: str) -> None:
    path = f"{CRDS}/{name}"
    try:
        cluster.request("delete", path)
    except NotFoundError:
        return
    wait_until(lambda: not cluster.exists(path), 30, f"CRD {name} to go")
