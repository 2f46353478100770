"""Install, upgrade and uninstall on a real API server. There is no kubelet: the operator itself runs as a process."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.helm.conftest import KVASIR_CRDS
from e2e.helm.helm import CHART, CI_FILES, Helm, HelmError
from tests.controlplane.control_plane import CRDS, ControlPlane
from tests.controlplane.credentials import write_kubeconfig
from tests.controlplane.operator_process import running_operator
from tests.controlplane.processes import wait_until
from tests.controlplane.reconciling import NAME, get_children, get_service, manifest
from tests.controlplane.test_operator_process import metric, wait_for_children

OPERATOR = "kvasir-operator"
PODS = "app.kubernetes.io/component=operator"
WITHOUT_MONITORING = [file for file in CI_FILES if not file.stem.startswith("monitoring")]
NAMESPACED = ("--set", "crds.install=false,rbac.aggregateRoles=false")


def deployment_path(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{OPERATOR}"


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


def service_account_kubeconfig(cluster: ControlPlane, namespace: str, name: str, directory: Path) -> Path:
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.request("post", path, request)["status"]["token"]
    kubeconfig = directory / "service-account.kubeconfig"
    write_kubeconfig(kubeconfig, cluster.url, cluster.directory / "tls" / "apiserver.crt", name, token)
    return kubeconfig


def installed_command(cluster: ControlPlane, namespace: str) -> list[str]:
    """Flags of the operator's container. Outside of a pod it cannot know its own namespace, where its Lease lies."""
    pod = cluster.request("get", deployment_path(namespace))["spec"]["template"]["spec"]
    args: list[str] = pod["containers"][0]["args"]
    is_namespaced = any(arg.startswith("--namespace=") for arg in args)
    return args if is_namespaced else [*args, f"--lease-namespace={namespace}"]


def assert_serves(cluster: ControlPlane, release_namespace: str, served: str, directory: Path) -> None:
    """The installed command, with the installed ServiceAccount's rights, makes a service's children."""
    kubeconfig = service_account_kubeconfig(cluster, release_namespace, OPERATOR, directory)
    log = directory / "log"
    with running_operator(kubeconfig, log, *installed_command(cluster, release_namespace)) as operator:
        operator.wait_until_ready()
        cluster.apply(manifest(served))
        wait_for_children(cluster, served)
        assert metric(operator, "kvasir_operator_reconcile_errors_total") == 0.0
    assert "forbidden" not in log.read_text().lower()


def test_every_object_of_every_ci_file_is_accepted(
    helm: Helm, cluster: ControlPlane, monitoring_crds: None, namespace: str, other_namespace: str
) -> None:
    for file in CI_FILES:
        watch = ("--set", f"watch.namespace={other_namespace}") if file.stem.startswith("namespaced") else ()
        for obj in helm.template("--values", file, *watch, namespace=namespace):
            cluster.apply(obj, dryRun="All")


@pytest.mark.parametrize("file", WITHOUT_MONITORING, ids=lambda file: file.stem)
def test_an_install_brings_pods_that_the_strictest_standard_admits(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str, file: Path
) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "operator", "namespace": namespace}}
    cluster.apply(account)  # as the minimal values expect
    watch = ("--set", f"watch.namespace={other_namespace}") if file.stem.startswith("namespaced") else ()
    helm.install(namespace, "--values", file, *watch)
    cluster.mark_pods_ready(namespace, PODS)


def test_monitoring_objects_appear_where_the_prometheus_operator_is(
    helm: Helm, cluster: ControlPlane, monitoring_crds: None, namespace: str
) -> None:
    helm.install(namespace)
    group = f"/apis/monitoring.coreos.com/v1/namespaces/{namespace}"
    monitors = cluster.request("get", f"{group}/podmonitors")["items"]
    assert {each["metadata"]["name"] for each in monitors} == {OPERATOR, "kvasir-engine", "kvasir-router"}
    assert len(cluster.request("get", f"{group}/prometheusrules")["items"]) == 1


def test_the_notes_say_how_to_go_on(helm: Helm, cluster: ControlPlane, namespace: str) -> None:
    notes = helm.install(namespace)
    example = notes.partition("<<EOF\n")[2].partition("EOF")[0]
    service: dict[str, Any] = yaml.safe_load(example)
    service["metadata"]["namespace"] = namespace
    cluster.apply(service)
    assert cluster.exists(f"/api/v1/namespaces/{namespace}/services/{OPERATOR}")


def test_an_upgrade_brings_the_new_crd_and_keeps_services(
    helm: Helm, cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    helm.install(namespace)
    cluster.apply(manifest(namespace))
    uid = get_service(cluster, namespace)["metadata"]["uid"]
    helm.upgrade(namespace, "--set", "operator.workers=9", chart=next_chart(tmp_path))
    assert "Model" in columns(cluster)
    assert "--workers=9" in installed_command(cluster, namespace)
    assert get_service(cluster, namespace)["metadata"]["uid"] == uid


def test_an_uninstall_leaves_crds_and_services_and_an_install_takes_them_over(
    helm: Helm, cluster: ControlPlane, namespace: str
) -> None:
    helm.install(namespace)
    cluster.apply(manifest(namespace))
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
    cluster.apply(manifest(namespace))
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


def test_a_cluster_wide_operator_serves_any_namespace(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str, tmp_path: Path
) -> None:
    helm.install(namespace)
    assert_serves(cluster, namespace, other_namespace, tmp_path)
    assert cluster.exists(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{OPERATOR}")


def test_a_namespaced_operator_serves_its_namespace(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str, tmp_path: Path
) -> None:
    apply_crds(cluster)
    helm.install(namespace, *NAMESPACED, "--set", f"watch.namespace={other_namespace}")
    assert_serves(cluster, namespace, other_namespace, tmp_path)
    assert get_children(cluster, namespace) == {}
    assert cluster.exists(f"/apis/coordination.k8s.io/v1/namespaces/{other_namespace}/leases/{OPERATOR}")


def test_a_namespaced_release_needs_no_right_outside_its_namespace(
    helm: Helm, cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    apply_crds(cluster)
    make_owner(cluster, namespace, "owner")
    owners = replace(helm, kubeconfig=service_account_kubeconfig(cluster, namespace, "owner", tmp_path))
    owners.install(namespace, *NAMESPACED, "--set", f"watch.namespace={namespace}")
    assert cluster.exists(deployment_path(namespace))
    owners.uninstall(namespace)
