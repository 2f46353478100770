"""The operator's process: woken by events, killed, stopped, confined to a namespace, and one of two."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.kinds import DEPLOYMENT, INFERENCE_SERVICE, LEASE, SERVICE, ObjectKey

from .control_plane import ControlPlane
from .credentials import OPERATOR, write_kubeconfig
from .operator_process import OperatorProcess, running_operator
from .port_forward import forwarding
from .processes import wait_until
from .programs import API_PORT
from .reconciling import (
    NAME,
    conditions,
    get_children,
    get_service,
    manifest,
    path_of,
    run_pass,
)

MERGE_PATCH = "application/merge-patch+json"
PODS = f"{SERVICE_LABEL}={NAME}"
ENGINE = ObjectKey(DEPLOYMENT, f"{NAME}-engine")
NUM_CHILDREN = 11
# What an operator that serves one namespace needs, and nothing else: the chart's Role.
ROLE_RULES = [
    {"apiGroups": ["serving.kvasir.dev"], "resources": ["inferenceservices"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["serving.kvasir.dev"], "resources": ["inferenceservices/status"], "verbs": ["get", "patch"]},
    {"apiGroups": ["serving.kvasir.dev"], "resources": ["inferenceservices/finalizers"], "verbs": ["update"]},
    *(
        {"apiGroups": [group], "resources": resources, "verbs": ["get", "list", "watch", "create", "patch", "delete"]}
        for group, resources in (
            ("", ["services", "serviceaccounts", "configmaps"]),
            ("apps", ["deployments"]),
            ("policy", ["poddisruptionbudgets"]),
            ("rbac.authorization.k8s.io", ["roles", "rolebindings"]),
        )
    ),
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["get", "list", "create", "patch"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
    # Held by the operator only so that it may hand it to routers.
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
]


def wait_for_children(control_plane: ControlPlane, namespace: str) -> None:
    wait_until(lambda: len(get_children(control_plane, namespace)) == NUM_CHILDREN, 30, "all children")


def wait_for_phase(control_plane: ControlPlane, namespace: str, phase: str) -> None:
    def is_reached() -> bool:
        return bool(get_service(control_plane, namespace).get("status", {}).get("phase") == phase)

    wait_until(is_reached, 30, f"phase {phase}")


def metric(operator: OperatorProcess, name: str) -> float:
    """Sum of a series' samples."""
    _, text = operator.get("/metrics")
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def engine_replicas(control_plane: ControlPlane, namespace: str) -> int:
    return int(get_children(control_plane, namespace)[ENGINE]["spec"]["replicas"])


def role_kubeconfig(control_plane: ControlPlane, namespace: str, directory: Path) -> Path:
    """Credentials of a ServiceAccount that has the Role above in one namespace, and no other right."""
    rbac, name = "rbac.authorization.k8s.io", "kvasir-operator"
    metadata = {"name": name, "namespace": namespace}
    control_plane.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    control_plane.apply({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": ROLE_RULES})
    control_plane.apply(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        }
    )
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = control_plane.request("post", path, request)["status"]["token"]
    certificate = control_plane.directory / "tls" / "apiserver.crt"
    write_kubeconfig(directory / "role.kubeconfig", control_plane.url, certificate, name, token)
    return directory / "role.kubeconfig"


def test_events_alone_drive_a_service_from_creation_to_deletion(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "log") as operator:
        operator.wait_until_ready()
        control_plane.apply(manifest(namespace))
        wait_for_children(control_plane, namespace)
        control_plane.mark_pods_ready(namespace, PODS, 4)
        wait_for_phase(control_plane, namespace, "Ready")

        control_plane.request("delete", path_of(SERVICE, namespace, f"{NAME}-router"))
        wait_for_children(control_plane, namespace)
        edit = {"spec": {"replicas": 9}}
        control_plane.request("patch", path_of(DEPLOYMENT, namespace, ENGINE.name), edit, MERGE_PATCH)
        wait_until(lambda: engine_replicas(control_plane, namespace) == 2, 30, "the edit to be undone")

        control_plane.request("delete", path_of(INFERENCE_SERVICE, namespace, NAME))
        wait_until(lambda: not get_children(control_plane, namespace), 30, "the children to go")
        assert metric(operator, "kvasir_operator_leader") == 1.0
    written = {each.resource for each in control_plane.writes(namespace=namespace)}
    assert "inferenceservices/status" in written
    assert "inferenceservices" not in written  # neither annotations nor finalizers


def test_a_killed_operator_is_continued_by_the_next_one_which_ends_cleanly(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = (f"--namespace={namespace}", "--workers=1")
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "first", *flags) as first:
        control_plane.apply(manifest(namespace))
        wait_until(lambda: control_plane.writes(OPERATOR, namespace), 40, "the first write")
        first.kill()
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "second", *flags) as second:
        wait_for_children(control_plane, namespace)
        control_plane.mark_pods_ready(namespace, PODS, 4)
        wait_for_phase(control_plane, namespace, "Ready")
        status, seconds = second.stop()
    assert (status, seconds < 10.0) == (0, True), (tmp_path / "second").read_text()
    # Nothing is left to do for a third operator, so all is as if there had only been one.
    assert run_pass(control_plane, namespace).writes == []


def test_a_role_in_one_namespace_is_enough(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    kubeconfig = role_kubeconfig(control_plane, namespace, tmp_path)
    with running_operator(kubeconfig, tmp_path / "log", f"--namespace={namespace}", "--leader-election") as operator:
        operator.wait_until_ready()
        control_plane.apply(manifest(namespace))
        wait_for_children(control_plane, namespace)
        control_plane.mark_pods_ready(namespace, PODS, 4)
        wait_for_phase(control_plane, namespace, "Ready")
        assert conditions(get_service(control_plane, namespace))["Degraded"] == ("False", "AsExpected")
        assert metric(operator, "kvasir_operator_reconcile_errors_total") == 0.0
        assert metric(operator, "kvasir_operator_api_writes_total") > NUM_CHILDREN
    assert "forbidden" not in (tmp_path / "log").read_text().lower()


def test_the_second_of_two_operators_stands_by_until_the_first_one_stops(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = (f"--namespace={namespace}", "--leader-election")
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "first", *flags) as first:
        wait_until(lambda: metric(first, "kvasir_operator_leader") == 1.0, 40, "the first one to lead")
        with running_operator(control_plane.operator_kubeconfig, tmp_path / "second", *flags) as second:
            wait_until(lambda: second.get("/readyz") == (200, "ok"), 20, "the second one to be ready")
            assert metric(second, "kvasir_operator_leader") == 0.0
            assert first.stop()[0] == 0
            wait_until(lambda: metric(second, "kvasir_operator_leader") == 1.0, 20, "the second one to lead")
            control_plane.apply(manifest(namespace))
            wait_for_children(control_plane, namespace)


def test_a_leader_whose_lease_is_taken_ends_at_once(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = (f"--namespace={namespace}", "--leader-election")
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "log", *flags) as operator:
        wait_until(lambda: metric(operator, "kvasir_operator_leader") == 1.0, 40, "it to lead")
        theft = {"spec": {"holderIdentity": "usurper", "leaseDurationSeconds": 60}}
        control_plane.request("patch", path_of(LEASE, namespace, "kvasir-operator"), theft, MERGE_PATCH)
        assert operator.process.wait(20) == 1
        assert "usurper took Lease" in (tmp_path / "log").read_text()


def test_an_operator_that_starts_while_the_api_server_is_away_goes_on_when_it_is_back(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    control_plane.apply(manifest(namespace))
    away = API_PORT + 1
    kubeconfig = control_plane.operator_kubeconfig.read_text().replace(f":{API_PORT}", f":{away}")
    (tmp_path / "config").write_text(kubeconfig)
    with running_operator(tmp_path / "config", tmp_path / "log", f"--namespace={namespace}") as operator:
        operator.word_after("waiting for the API server: ")
        assert (operator.get("/healthz")[0], operator.get("/readyz")[0]) == (200, 503)
        with forwarding(str(urlsplit(control_plane.url).hostname), away, API_PORT):
            operator.wait_until_ready()
            wait_for_children(control_plane, namespace)
            assert operator.stop()[0] == 0
    assert (tmp_path / "log").read_text().count("waiting for the API server") == 1


def test_a_user_id_without_a_passwd_entry_may_run_the_operator(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.getuid = lambda: 54321\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "log", f"--namespace={namespace}") as operator:
        operator.wait_until_ready()
