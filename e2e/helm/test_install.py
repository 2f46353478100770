"""Install, upgrade and uninstall on a real API server. There is no kubelet: the operator itself runs as a process."""

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from e2e.helm.conftest import KVASIR_CRDS
from e2e.helm.helm import CHART, CI_FILES, REGISTRY_NAMED, ROOT, Helm, HelmError
from e2e.helm.installed import (
    OPERATOR,
    certificate,
    deployment_path,
    installed_flags,
    running_installed,
    service_account_kubeconfig,
    service_account_token,
)
from tests.controlplane.control_plane import CRDS, ControlPlane
from tests.controlplane.processes import wait_until
from tests.controlplane.reconciling import NAME, get_service, manifest
from tests.controlplane.test_operator_process import MERGE_PATCH, metric

from kvasir_operator.api import labels
from kvasir_operator.kube.leadership import CLUSTER_LEASE, OWN_LEASE

ANY_CHILD = labels.SERVICE_LABEL
PODS = "app.kubernetes.io/component=operator"
WITHOUT_MONITORING = [file for file in CI_FILES if not file.stem.startswith("monitoring")]
NAMESPACED = ("--set", "crds.install=false,rbac.aggregateRoles=false")


def columns(cluster: ControlPlane) -> set[str]:
    [version] = cluster.request("get", f"{CRDS}/{KVASIR_CRDS[0]}")["spec"]["versions"]
    return {column["name"] for column in version["additionalPrinterColumns"]}


def next_chart(directory: Path) -> Path:
    """The chart of a later release, whose CRD shows one column more."""
    chart = directory / "next"
    shutil.copytree(CHART, chart)
    [file] = (chart / "files" / "crds").iterdir()
    crd = yaml.safe_load(file.read_text())
    column = {"name": "Model", "type": "string", "jsonPath": ".spec.model.name"}
    crd["spec"]["versions"][0]["additionalPrinterColumns"].append(column)
    file.write_text(yaml.safe_dump(crd))
    about = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(about.replace("version: ", "version: 9", 1))
    return chart


def apply_crds(cluster: ControlPlane) -> None:
    """As an administrator does it with kubectl."""
    for path in (CHART / "files" / "crds").iterdir():
        cluster.install_crd(yaml.safe_load(path.read_text()))


def apply_service(cluster: ControlPlane, service: dict[str, Any]) -> None:
    """Right after an install, when the API server may not serve the kind yet."""
    cluster.wait_until_served(KVASIR_CRDS[0])
    cluster.apply(service)


def make_owner(cluster: ControlPlane, namespace: str, name: str) -> None:
    """A ServiceAccount with every right in its namespace and none elsewhere."""
    metadata, rbac = {"name": name, "namespace": namespace}, "rbac.authorization.k8s.io"
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    cluster.apply(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        }
    )


def assert_serves(cluster: ControlPlane, release_namespace: str, served: str, directory: Path) -> None:
    """The installed operator, with the installed ServiceAccount's rights, brings up a service's pods."""
    with running_installed(cluster, release_namespace, directory) as operator:
        operator.wait_until_ready()
        cluster.apply(manifest(served))
        for role in (labels.ROLE_SERVE, labels.ROLE_ROUTER):
            cluster.wait_for_pods(served, labels.selector_text(labels.role_selector(NAME, role)), 2)
        assert metric(operator, "kvasir_operator_reconcile_errors_total") == 0.0
    assert "forbidden" not in operator.log.read_text().lower()


def named(namespaces: str) -> tuple[str, str]:
    return ("--set", f"watch.namespaces={{{namespaces}}}")


def values_of(file: Path, watched: str) -> tuple[str | Path, ...]:
    """A ci file with the namespaces that it names replaced by one that is there."""
    return ("--values", file, "--set", f"watch.clusterLeaseNamespace={watched}") + (
        named(watched) if file.stem.startswith("namespaced") else ()
    )


def lease_path(namespace: str, name: str = OWN_LEASE) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"


def test_every_object_of_every_ci_file_is_accepted(
    helm: Helm, cluster: ControlPlane, monitoring_crds: None, namespace: str, other_namespace: str
) -> None:
    for file in CI_FILES:
        for obj in helm.template(*values_of(file, other_namespace), namespace=namespace):
            if obj["kind"] != "Pod":  # which is only admitted where its ServiceAccount is: the next test
                cluster.apply(obj, dryRun="All")


# Seccomp left to the platform is what the standard does not take.
@pytest.mark.parametrize(
    "file", [file for file in WITHOUT_MONITORING if file.stem != "platform-values"], ids=lambda file: file.stem
)
def test_an_install_brings_pods_that_the_strictest_standard_admits(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str, file: Path
) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "operator", "namespace": namespace}}
    cluster.apply(account)  # as the minimal values expect
    values = values_of(file, other_namespace)
    helm.install(namespace, *values)
    cluster.mark_pods_ready(namespace, PODS)
    for obj in helm.template(*values, namespace=namespace):
        if obj["kind"] == "Pod":  # that of `helm test`
            cluster.apply(obj, dryRun="All")


def test_monitoring_objects_appear_where_the_prometheus_operator_is(
    helm: Helm, cluster: ControlPlane, monitoring_crds: None, namespace: str
) -> None:
    helm.install(namespace)
    group = f"/apis/monitoring.coreos.com/v1/namespaces/{namespace}"
    monitors = cluster.request("get", f"{group}/podmonitors")["items"]
    assert {each["metadata"]["name"] for each in monitors} == {OPERATOR}
    assert len(cluster.request("get", f"{group}/prometheusrules")["items"]) == 1


def test_the_notes_say_how_to_go_on(helm: Helm, cluster: ControlPlane, namespace: str) -> None:
    notes = helm.install(namespace)
    example = notes.partition("<<EOF\n")[2].partition("EOF")[0]
    service: dict[str, Any] = yaml.safe_load(example)
    service["metadata"]["namespace"] = namespace
    apply_service(cluster, service)
    page = (ROOT / "docs" / "install.md").read_text()
    [five] = [each for each in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "<<EOF" in each]
    assert five in notes, "docs/install.md says something else"
    assert cluster.exists(f"/api/v1/namespaces/{namespace}/services/{OPERATOR}")


def test_an_upgrade_brings_the_new_crd_and_keeps_services(
    helm: Helm, cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    helm.install(namespace)
    apply_service(cluster, manifest(namespace))
    uid = get_service(cluster, namespace)["metadata"]["uid"]
    helm.upgrade(namespace, "--set", "operator.workers=9", chart=next_chart(tmp_path))
    assert "Model" in columns(cluster)
    assert "--workers=9" in installed_flags(cluster, namespace)
    assert get_service(cluster, namespace)["metadata"]["uid"] == uid


def test_an_uninstall_leaves_crds_and_services_and_an_install_takes_them_over(
    helm: Helm, cluster: ControlPlane, namespace: str
) -> None:
    helm.install(namespace)
    apply_service(cluster, manifest(namespace))
    helm.uninstall(namespace)
    assert not cluster.exists(deployment_path(namespace))
    assert not cluster.exists(f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{OPERATOR}")
    assert get_service(cluster, namespace)["metadata"]["name"] == NAME
    helm.install(namespace)
    assert cluster.exists(deployment_path(namespace))


def test_an_upgrade_that_no_longer_installs_the_crds_leaves_them(
    helm: Helm, cluster: ControlPlane, namespace: str
) -> None:
    helm.install(namespace)
    apply_service(cluster, manifest(namespace))
    helm.upgrade(namespace, "--set", "crds.install=false")
    assert get_service(cluster, namespace)["metadata"]["name"] == NAME


def test_crds_that_are_not_kept_go_with_the_release(helm: Helm, cluster: ControlPlane, namespace: str) -> None:
    helm.install(namespace)
    helm.upgrade(namespace, "--set", "crds.keep=false")
    helm.uninstall(namespace)
    wait_until(lambda: not cluster.exists(f"{CRDS}/{KVASIR_CRDS[0]}"), 30, "the CRD to go")


def test_crds_of_somebody_else_are_taken_over_only_when_told(helm: Helm, cluster: ControlPlane, namespace: str) -> None:
    apply_crds(cluster)
    with pytest.raises(HelmError, match="ownership"):
        helm.install(namespace)
    helm.install(namespace, "--take-ownership")


HOLDER = {"spec": {"holderIdentity": "somebody", "leaseDurationSeconds": 3600}}


def test_an_upgrade_leaves_the_leases_to_their_holder_and_an_uninstall_releases_them(
    helm: Helm, cluster: ControlPlane, namespace: str
) -> None:
    leases = [lease_path(namespace), lease_path("default", CLUSTER_LEASE)]
    helm.install(namespace)
    for path in leases:
        cluster.request("patch", path, HOLDER, MERGE_PATCH)
    helm.upgrade(namespace, "--set", "operator.workers=9")
    assert [cluster.request("get", path)["spec"] for path in leases] == [HOLDER["spec"]] * 2
    helm.uninstall(namespace)
    assert not any(cluster.exists(path) for path in leases)


def test_an_uninstall_beneath_a_live_operator_leaves_no_lease_in_the_way_of_the_next_install(
    helm: Helm, cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Its rights are somebody else's and outlive the release: it could make the Lease anew."""
    apply_crds(cluster)
    make_owner(cluster, namespace, OPERATOR)
    accounts = ("--set", f"rbac.create=false,serviceAccount.create=false,serviceAccount.name={OPERATOR}")
    values = (*NAMESPACED, *named(namespace), *accounts)
    path = lease_path(namespace)
    helm.install(namespace, *values)
    with running_installed(cluster, namespace, tmp_path) as operator:
        wait_until(lambda: metric(operator, "kvasir_operator_leader") == 1.0, 40, "the operator to lead")
        helm.uninstall(namespace)
        operator.word_after(f"Lease {namespace}/{OWN_LEASE} is gone")
        assert operator.stop()[0] == 0
    assert not cluster.exists(path)
    helm.install(namespace, *values)
    assert "helm.sh/chart" in cluster.request("get", path)["metadata"]["labels"]


def test_two_releases_for_the_whole_cluster_refuse_each_other(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str
) -> None:
    helm.install(namespace)
    second = ("install", "second", CHART, "--namespace", other_namespace, *REGISTRY_NAMED, *NAMESPACED)
    with pytest.raises(HelmError, match=f'Lease "{CLUSTER_LEASE}" in namespace "default" exists'):
        helm.run(*second)
    helm.run(*second, *named(other_namespace))  # in a namespace of its own it may
    assert cluster.exists(lease_path(other_namespace))
    helm.run("uninstall", "second", "--namespace", other_namespace)


def test_the_test_of_a_release_asks_the_operator_and_lists_services(
    helm: Helm, cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    helm.install(namespace)
    (tmp_path / "token").write_text(service_account_token(cluster, namespace, OPERATOR))
    shutil.copy(certificate(cluster), tmp_path / "ca.crt")
    address = urlsplit(cluster.url)
    environment = {
        "KUBERNETES_SERVICE_HOST": str(address.hostname),
        "KUBERNETES_SERVICE_PORT": str(address.port),
        "SERVICE_ACCOUNT_FOLDER": str(tmp_path),
    }
    with serving_readyz() as readyz_url:
        command = [sys.executable, CHART / "files" / "helm_test.py", readyz_url]
        cluster_wide = subprocess.run(command, env=environment, capture_output=True, text=True)
        one = subprocess.run([*command, namespace], env=environment, capture_output=True, text=True)
    assert cluster_wide.stdout == "the operator is ready: ok\nthe API server lists InferenceServiceList\n"
    assert one.stdout.endswith(f"lists InferenceServiceList/namespaces/{namespace}\n")


@contextmanager
def serving_readyz() -> Iterator[str]:
    """Stands for the operator, which has tests of its own."""

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/readyz"
        server.shutdown()


def test_a_cluster_wide_operator_serves_any_namespace(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str, tmp_path: Path
) -> None:
    helm.install(namespace)
    assert_serves(cluster, namespace, other_namespace, tmp_path)


def test_a_namespaced_operator_serves_its_namespace(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str, tmp_path: Path
) -> None:
    apply_crds(cluster)
    helm.install(namespace, *NAMESPACED, *named(other_namespace))
    assert_serves(cluster, namespace, other_namespace, tmp_path)
    assert (
        cluster.request("get", f"/apis/apps/v1/namespaces/{namespace}/deployments", labelSelector=ANY_CHILD)["items"]
        == []
    )


def test_a_namespaced_release_needs_no_right_outside_its_namespace(
    helm: Helm, cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    apply_crds(cluster)
    make_owner(cluster, namespace, "owner")
    owners = replace(helm, kubeconfig=service_account_kubeconfig(cluster, namespace, "owner", tmp_path))
    owners.install(namespace, *NAMESPACED, *named(namespace))
    assert cluster.exists(deployment_path(namespace))
    owners.uninstall(namespace)
