"""The operator that a release has installed, run as a process: there is no kubelet that would run its pod.

It has the flags of the installed Deployment, the file of its pods' annotation, and its ServiceAccount's token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.controlplane.control_plane import ControlPlane
from tests.controlplane.credentials import write_kubeconfig
from tests.controlplane.operator_process import OperatorProcess, running_operator

OPERATOR = "kvasir-operator"
DEFAULTS_FLAG = "--pod-defaults="
POD_DEFAULTS = "serving.kvasir.dev/pod-defaults"


def deployment_path(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{OPERATOR}"


def installed_flags(cluster: ControlPlane, namespace: str) -> list[str]:
    flags: list[str] = installed_pod(cluster, namespace)["spec"]["containers"][0]["args"]
    return flags


def installed_pod(cluster: ControlPlane, namespace: str) -> dict[str, Any]:
    pod: dict[str, Any] = cluster.request("get", deployment_path(namespace))["spec"]["template"]
    return pod


def service_account_kubeconfig(cluster: ControlPlane, namespace: str, name: str, directory: Path) -> Path:
    kubeconfig = directory / f"{namespace}-{name}.kubeconfig"
    token = service_account_token(cluster, namespace, name)
    write_kubeconfig(kubeconfig, cluster.url, certificate(cluster), name, token)
    return kubeconfig


def service_account_token(cluster: ControlPlane, namespace: str, name: str) -> str:
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return str(cluster.request("post", path, request)["status"]["token"])


def certificate(cluster: ControlPlane) -> Path:
    return cluster.directory / "tls" / "apiserver.crt"


@contextmanager
def running_installed(cluster: ControlPlane, namespace: str, directory: Path, *flags: str) -> Iterator[OperatorProcess]:
    """The operator of the release in `namespace`, with its log in `directory`; `flags` are added to its own."""
    kubeconfig = service_account_kubeconfig(cluster, namespace, OPERATOR, directory)
    defaults = directory / "pod-defaults.yaml"
    defaults.write_text(installed_pod(cluster, namespace)["metadata"]["annotations"][POD_DEFAULTS])
    installed = [
        f"{DEFAULTS_FLAG}{defaults}" if flag.startswith(DEFAULTS_FLAG) else flag
        for flag in installed_flags(cluster, namespace)
    ]
    with running_operator(kubeconfig, directory / f"{namespace}.log", *installed, *flags) as operator:
        yield operator
