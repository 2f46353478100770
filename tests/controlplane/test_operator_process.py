"""The operator's process: woken by events, killed, stopped, confined to a namespace, and one of two."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvasir_operator.api.labels import ROLE_LABEL, ROLE_SERVE, SERVICE_LABEL
from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.objects import desired_objects
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, LEASE, SERVICE, KubeObject, object_key
from kvasir_operator.kube.leadership import CLUSTER_LEASE, OWN_LEASE
from kvasir_operator.settings import OperatorSettings

from .control_plane import ControlPlane
from .credentials import OPERATOR
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
from .rights import role_kubeconfig

MERGE_PATCH = "application/merge-patch+json"
PODS = f"{SERVICE_LABEL}={NAME}"


def wait_for_children(control_plane: ControlPlane, namespace: str) -> None:
    wanted = {object_key(obj) for obj in desired_objects(parse_service(manifest(namespace)), OperatorSettings())}
    wait_until(lambda: set(get_children(control_plane, namespace)) == wanted, 30, "all children, and no others")


def wait_for_phase(control_plane: ControlPlane, namespace: str, phase: str) -> None:
    def is_reached() -> bool:
        return bool(get_service(control_plane, namespace).get("status", {}).get("phase") == phase)

    wait_until(is_reached, 30, f"phase {phase}")


def metric(operator: OperatorProcess, name: str) -> float:
    """Sum of a series' samples."""
    _, text = operator.get(f"/metrics?name[]={name}")
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def engine(control_plane: ControlPlane, namespace: str) -> KubeObject:
    """The engines' Deployment."""
    children = get_children(control_plane, namespace)
    [found] = [
        child
        for key, child in children.items()
        if key.kind == DEPLOYMENT and child["metadata"]["labels"][ROLE_LABEL] == ROLE_SERVE
    ]
    return found


def test_events_alone_drive_a_service_from_creation_to_deletion(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = (f"--namespace={namespace}",)  # other tests' services have series too
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "log", *flags) as operator:
        operator.wait_until_ready()
        control_plane.apply(manifest(namespace))
        wait_for_children(control_plane, namespace)
        control_plane.mark_pods_ready(namespace, PODS, 4)
        wait_for_phase(control_plane, namespace, "Ready")
        wait_until(lambda: metric(operator, "kvasir_operator_service_ready") == 1.0, 10, "the series of its readiness")
        assert metric(operator, "kvasir_operator_service_desired_replicas") == 4.0
        assert f'kvasir_operator_replica_restarts_total{{inference_service="{NAME}"' in operator.get("/metrics")[1]

        control_plane.request("delete", path_of(SERVICE, namespace, f"{NAME}-router"))
        wait_for_children(control_plane, namespace)
        edit = {"spec": {"replicas": 9}}
        path = path_of(DEPLOYMENT, namespace, engine(control_plane, namespace)["metadata"]["name"])
        control_plane.request("patch", path, edit, MERGE_PATCH)
        wait_until(lambda: engine(control_plane, namespace)["spec"]["replicas"] == 2, 30, "the edit to be undone")

        control_plane.request("delete", path_of(INFERENCE_SERVICE, namespace, NAME))
        wait_until(lambda: not get_children(control_plane, namespace), 30, "the children to go")
        wait_until(lambda: f'="{NAME}"' not in operator.get("/metrics")[1], 10, "its series to go")
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
    assert run_pass(control_plane, namespace, settings=OperatorSettings(namespace=(namespace,))).writes == []


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
        assert operator.writes("apply", "Deployment") >= 2
        assert operator.writes("apply_status", "InferenceService") >= 1
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


def test_a_second_cluster_wide_release_stands_by_and_says_who_leads_until_the_first_is_uninstalled(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    def flags(release: str) -> tuple[str, ...]:
        control_plane.create_namespace(release)
        return (f"--lease-namespace={release}", "--leader-election")

    kubeconfig = control_plane.operator_kubeconfig
    with running_operator(kubeconfig, tmp_path / "first", *flags(f"{namespace}-first")) as first:
        wait_until(lambda: metric(first, "kvasir_operator_leader") == 1.0, 40, "the first one to lead")
        with running_operator(kubeconfig, tmp_path / "second", *flags(f"{namespace}-second")) as second:
            holder = second.word_before(f" serves the whole cluster (it holds Lease default/{CLUSTER_LEASE})")
            lease = control_plane.request("get", path_of(LEASE, "default", CLUSTER_LEASE))
            assert holder == lease["spec"]["holderIdentity"]
            second.wait_until_ready()
            assert metric(second, "kvasir_operator_leader") == 0.0
            assert first.stop()[0] == 0
            wait_until(lambda: metric(second, "kvasir_operator_leader") == 1.0, 20, "the second one to lead")
            assert second.stop()[0] == 0
    for name, place in ((CLUSTER_LEASE, "default"), (OWN_LEASE, f"{namespace}-second")):
        assert not control_plane.request("get", path_of(LEASE, place, name))["spec"]["holderIdentity"]


def test_operators_of_several_namespaces_serve_these_and_no_others(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    other = f"{namespace}-other"
    control_plane.create_namespace(other)
    flags = (f"--namespace={namespace}", f"--namespace={other}", "--leader-election")
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "log", *flags) as operator:
        operator.wait_until_ready()
        for each in (namespace, other):
            control_plane.apply(manifest(each))
            wait_for_children(control_plane, each)
    control_plane.delete_namespace(other)


def test_a_leader_whose_lease_is_taken_ends_at_once(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = (f"--namespace={namespace}", "--leader-election")
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "log", *flags) as operator:
        wait_until(lambda: metric(operator, "kvasir_operator_leader") == 1.0, 40, "it to lead")
        theft = {"spec": {"holderIdentity": "usurper", "leaseDurationSeconds": 60}}
        control_plane.request("patch", path_of(LEASE, namespace, OWN_LEASE), theft, MERGE_PATCH)
        assert operator.process.wait(20) == 1
        assert "usurper took Lease" in (tmp_path / "log").read_text()


def test_an_operator_that_ends_while_its_lease_is_gone_leaves_none(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    lease = path_of(LEASE, namespace, OWN_LEASE)
    flags = (f"--namespace={namespace}", "--leader-election")
    with running_operator(control_plane.operator_kubeconfig, tmp_path / "log", *flags) as operator:
        wait_until(lambda: metric(operator, "kvasir_operator_leader") == 1.0, 40, "it to lead")
        control_plane.request("delete", lease)
        operator.word_after(f"Lease {namespace}/{OWN_LEASE} is gone")
        assert operator.stop()[0] == 0
    assert not control_plane.exists(lease)


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
