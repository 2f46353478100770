"""The operator's process: woken by events, with few rights, stopped, and beside another one.

What becomes of its work when it is killed or paused is test_handover.py's.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.charts.chart_rules import operator_rules

from kvasir_operator.api.labels import ROLE_LABEL, ROLE_SERVE, SERVICE_LABEL
from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.objects import desired_objects
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, LEASE, SERVICE, KubeObject, object_key
from kvasir_operator.kube.leadership import CLUSTER_LEASE, OWN_LEASE
from kvasir_operator.settings import OperatorSettings

from .control_plane import ControlPlane
from .operator_process import OperatorProcess, forked_operator, running_operator
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
)
from .rights import account, changes, grant, role_kubeconfig

MERGE_PATCH = "application/merge-patch+json"
PODS = f"{SERVICE_LABEL}={NAME}"
FIRST, SECOND = "watched-first", "watched-second"


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """The installed program under a user id without a passwd entry, with the chart's rights in the two namespaces that
    it watches."""
    directory = tmp_path_factory.mktemp("operator")
    (directory / "sitecustomize.py").write_text("import os\nos.getuid = lambda: 54321\n")
    for namespace in (FIRST, SECOND):
        control_plane.create_namespace(namespace)
    kubeconfig = role_kubeconfig(control_plane, FIRST, directory)
    grant(control_plane, SECOND, account(FIRST), operator_rules(OperatorSettings().router_cluster_role))
    flags = (f"--namespace={FIRST}", f"--namespace={SECOND}", "--leader-election")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
            patch.delenv(name, raising=False)
        with running_operator(kubeconfig, directory / "log", *flags) as running:
            running.wait_until_ready()
            yield running
    for namespace in (FIRST, SECOND):
        control_plane.delete_namespace(namespace)


def wait_for_children(control_plane: ControlPlane, namespace: str, **spec: Any) -> None:
    """Of `manifest`."""
    service = parse_service(manifest(namespace, **spec))
    wanted = {object_key(obj) for obj in desired_objects(service, OperatorSettings())}
    wait_until(lambda: set(get_children(control_plane, namespace)) == wanted, 30, "all children, and no others")


def wait_for_phase(control_plane: ControlPlane, namespace: str, phase: str) -> None:
    def is_reached() -> bool:
        return bool(get_service(control_plane, namespace).get("status", {}).get("phase") == phase)

    wait_until(is_reached, 30, f"phase {phase}")


def metric(operator: OperatorProcess, name: str, label: str = "") -> float:
    """Sum of a series' samples that have `label`, written as in a page of metrics."""
    _, text = operator.get(f"/metrics?name[]={name}")
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*{label}.*}})? (\S+)$", text, re.MULTILINE))


def engine(control_plane: ControlPlane, namespace: str) -> KubeObject:
    """The engines' Deployment."""
    children = get_children(control_plane, namespace)
    [found] = [
        child
        for key, child in children.items()
        if key.kind == DEPLOYMENT and child["metadata"]["labels"][ROLE_LABEL] == ROLE_SERVE
    ]
    return found


def test_a_role_in_each_of_its_namespaces_is_enough(control_plane: ControlPlane, operator: OperatorProcess) -> None:
    control_plane.apply(manifest(SECOND))
    wait_for_children(control_plane, SECOND)
    control_plane.mark_pods_ready(SECOND, PODS, 4)
    wait_for_phase(control_plane, SECOND, "Ready")
    assert conditions(get_service(control_plane, SECOND))["Degraded"] == ("False", "AsExpected")
    assert metric(operator, "kvasir_operator_reconcile_errors_total") == 0.0
    assert operator.writes("apply", "Deployment") >= 2
    assert operator.writes("apply_status", "InferenceService") >= 1
    assert "forbidden" not in operator.log.read_text().lower()


def test_events_alone_drive_a_service_from_creation_to_deletion(
    control_plane: ControlPlane, operator: OperatorProcess
) -> None:
    of_it = f'service_namespace="{FIRST}"'
    control_plane.apply(manifest(FIRST))
    wait_for_children(control_plane, FIRST)
    control_plane.mark_pods_ready(FIRST, PODS, 4)
    wait_for_phase(control_plane, FIRST, "Ready")
    wait_until(lambda: metric(operator, "kvasir_operator_service_ready", of_it) == 1.0, 10, "its series of readiness")
    assert metric(operator, "kvasir_operator_service_desired_replicas", of_it) == 4.0
    assert f'kvasir_operator_replica_restarts_total{{inference_service="{NAME}"' in operator.get("/metrics")[1]

    control_plane.request("delete", path_of(SERVICE, FIRST, f"{NAME}-router"))
    wait_for_children(control_plane, FIRST)
    edit = {"spec": {"replicas": 9}}
    path = path_of(DEPLOYMENT, FIRST, engine(control_plane, FIRST)["metadata"]["name"])
    control_plane.request("patch", path, edit, MERGE_PATCH)
    wait_until(lambda: engine(control_plane, FIRST)["spec"]["replicas"] == 2, 30, "the edit to be undone")

    control_plane.request("delete", path_of(INFERENCE_SERVICE, FIRST, NAME))
    wait_until(lambda: not get_children(control_plane, FIRST), 30, "the children to go")
    wait_until(lambda: of_it not in operator.get("/metrics")[1], 10, "its series to go")
    assert metric(operator, "kvasir_operator_leader") == 1.0
    written = {each.resource for each in changes(control_plane, account(FIRST), FIRST)}
    assert "inferenceservices/status" in written
    assert "inferenceservices" not in written  # neither annotations nor finalizers


def test_a_second_cluster_wide_release_stands_by_and_says_who_leads_until_the_first_is_uninstalled(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    def flags(release: str) -> tuple[str, ...]:
        control_plane.create_namespace(release)
        return (f"--lease-namespace={release}", "--leader-election")

    kubeconfig = control_plane.operator_kubeconfig
    with forked_operator(kubeconfig, tmp_path / "first", *flags(f"{namespace}-first")) as first:
        wait_until(lambda: metric(first, "kvasir_operator_leader") == 1.0, 40, "the first one to lead")
        with forked_operator(kubeconfig, tmp_path / "second", *flags(f"{namespace}-second")) as second:
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


def test_an_operator_that_ends_while_its_lease_is_gone_leaves_none(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    lease = path_of(LEASE, namespace, OWN_LEASE)
    flags = (f"--namespace={namespace}", "--leader-election")
    with forked_operator(control_plane.operator_kubeconfig, tmp_path / "log", *flags) as operator:
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
    with forked_operator(tmp_path / "config", tmp_path / "log", f"--namespace={namespace}") as operator:
        operator.word_after("waiting for the API server: ")
        assert (operator.get("/healthz")[0], operator.get("/readyz")[0]) == (200, 503)
        with forwarding(str(urlsplit(control_plane.url).hostname), away, API_PORT):
            operator.wait_until_ready()
            wait_for_children(control_plane, namespace)
            assert operator.stop()[0] == 0
    assert (tmp_path / "log").read_text().count("waiting for the API server") == 1
