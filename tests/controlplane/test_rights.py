"""The chart's rules are enough for all that an operator ever does, and none of them is idle.

What is used is read from the API server's audit log, after the operator has lived through its services' lives under its
own ServiceAccount. e2e/helm/test_rights.py asks the same of what Helm installs.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.charts.chart_rules import operator_rules, permissions, rules_of

from kvasir_operator.api.labels import ROLE_LABEL, ROLE_SERVE, SERVICE_LABEL, role_selector, selector_text
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, LEADER_WORKER_SET
from kvasir_operator.settings import OperatorSettings

from .conftest import LEADER_WORKER_SETS
from .control_plane import CRDS, ControlPlane
from .fake_answers import engine_at_work, prometheus
from .fake_node import MERGE_PATCH, bind_pod, list_pods, report_loading
from .operator_process import OperatorProcess, forked_operator
from .processes import wait_until
from .reconciling import get_service, manifest, path_of
from .rights import account, grant, refused, role_kubeconfig, used
from .service_life import live_through, running
from .test_gateway import GATEWAY, GATEWAY_SECRET, PODS, make_gateway
from .test_optional_kinds import POD_MONITOR_CRD

# The first is checked when a child names its service as an owner, the other when a role is bound.
NEVER_ASKED = {
    ("serving.kvasir.dev", "inferenceservices/finalizers", "update"),
    ("rbac.authorization.k8s.io", "roles", "bind"),
}
ELDER, DEMANDED, SHARED, FETCHED = "elder", "demanded", "shared", "fetched"
LONG_AGO = timedelta(hours=1)
SECONDS = 120.0


@pytest.fixture
def pod_monitors(control_plane: ControlPlane) -> Iterator[None]:
    """The kind is served while the test runs."""
    control_plane.install_crd(POD_MONITOR_CRD)
    yield
    control_plane.remove_crd(POD_MONITOR_CRD["metadata"]["name"])


@pytest.fixture
def gateway_namespace(control_plane: ControlPlane, namespace: str) -> Iterator[str]:
    """With a gateway that is ready."""
    name = f"{namespace}-gateway"
    control_plane.create_namespace(name)
    make_gateway(control_plane, name)
    control_plane.mark_pods_ready(name, PODS)
    yield name
    control_plane.delete_namespace(name)


@pytest.fixture
def no_leader_worker_sets(control_plane: ControlPlane, namespace: str) -> Iterator[None]:
    """Until the test installs the kind; it is served afterwards."""
    crd = yaml.safe_load(LEADER_WORKER_SETS.read_text())
    control_plane.request("delete", f"{CRDS}/{crd['metadata']['name']}")
    wait_until(lambda: not control_plane.exists(path_of(LEADER_WORKER_SET, namespace)), 30, "the kind to go")
    yield
    control_plane.install_crd(crd)


@pytest.mark.usefixtures("pod_monitors", "no_leader_worker_sets")
def test_the_charts_rules_are_enough_and_none_is_idle(
    control_plane: ControlPlane,
    namespace: str,
    gateway_namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kubeconfig, user = role_kubeconfig(control_plane, namespace, tmp_path), account(namespace)
    grant(control_plane, gateway_namespace, user, rules_of("kvasir.gatewayLookRules"))
    defaults = {"gateway": {"namespace": gateway_namespace, "name": GATEWAY, "podLabels": {"app": GATEWAY}}}
    (tmp_path / "defaults.yaml").write_text(yaml.safe_dump(defaults))
    monkeypatch.setenv("KVASIR_GATEWAY_SECRET", GATEWAY_SECRET)
    with ExitStack() as stack:
        url = stack.enter_context(prometheus(lambda: kv_usage(control_plane, namespace, gateway_namespace)))
        flags = (
            *(f"--namespace={namespace}", "--leader-election", f"--pod-defaults={tmp_path / 'defaults.yaml'}"),
            *(f"--prometheus-url={url}", "--autoscaling-seconds=1", "--resync-seconds=1", "--lease-seconds=3"),
        )
        operator = stack.enter_context(forked_operator(kubeconfig, tmp_path / "log", *flags))
        operator.wait_until_ready()
        make_elder(control_plane, namespace, operator)
        live_through(control_plane, user, namespace, namespace)
        scale(control_plane, namespace, ELDER, 2)
        wait_until(lambda: num_groups(control_plane, namespace) == 2, SECONDS, "another group, made as the first one")
        download(control_plane, namespace)
        follow_demand(control_plane, namespace)
        sleep_behind_the_gateway(control_plane, namespace)
        wait_until(
            lambda: ("", "pods", "list") in used(control_plane, user, gateway_namespace),
            SECONDS,
            "the gateway's pods to be asked for",
        )
    assert refused(control_plane, user) == []
    rules = permissions(operator_rules(OperatorSettings().router_cluster_role))
    assert rules - used(control_plane, user, namespace) == NEVER_ASKED
    assert permissions(rules_of("kvasir.gatewayLookRules")) == used(control_plane, user, gateway_namespace)


def make_elder(control_plane: ControlPlane, namespace: str, operator: OperatorProcess) -> None:
    """A service whose groups are StatefulSets, as it was made before LeaderWorkerSets were offered; now they are."""
    control_plane.apply(manifest(namespace, ELDER, replicas=1, parallelism={"pipeline": 2}))
    wait_until(lambda: num_groups(control_plane, namespace) == 1, SECONDS, "a group")
    control_plane.install_crd(yaml.safe_load(LEADER_WORKER_SETS.read_text()))
    offered = f"the cluster serves {LEADER_WORKER_SET.kind}"
    wait_until(lambda: offered in operator.log.read_text(), SECONDS, "the operator to notice")


def num_groups(control_plane: ControlPlane, namespace: str) -> int:
    path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
    return len(control_plane.request("get", path, labelSelector=f"{SERVICE_LABEL}={ELDER}")["items"])


def scale(control_plane: ControlPlane, namespace: str, name: str, replicas: int) -> None:
    patch = {"spec": {"replicas": replicas}}
    control_plane.request("patch", path_of(INFERENCE_SERVICE, namespace, name), patch, MERGE_PATCH)


def engines(name: str) -> str:
    return selector_text(role_selector(name, ROLE_SERVE))


def kv_usage(control_plane: ControlPlane, *namespaces: str) -> list[tuple[dict[str, str], float]]:
    """Of all pods; those of one service are full, and the others have nothing to do."""
    pods = [pod["metadata"] for namespace in namespaces for pod in list_pods(control_plane, namespace)]
    return [(series_labels(each), 0.9 if each["labels"].get(SERVICE_LABEL) == DEMANDED else 0.0) for each in pods]


def series_labels(metadata: Mapping[str, Any]) -> dict[str, str]:
    service, role = (metadata["labels"].get(name, "") for name in (SERVICE_LABEL, ROLE_LABEL))
    return {"namespace": metadata["namespace"], "pod": metadata["name"], "inference_service": service, "role": role}


def download(control_plane: ControlPlane, namespace: str) -> None:
    model = {"source": "hf://org/name", "cache": {"sizeLimit": "20Gi"}}
    control_plane.apply(manifest(namespace, FETCHED, replicas=1, model=model))
    [pod] = control_plane.wait_for_pods(namespace, engines(FETCHED))
    with engine_at_work() as address:
        bind_pod(control_plane, pod, "node-1")
        report_loading(control_plane, pod, address)
        wait_until(lambda: "5.00 of 20.00 GB" in status_text(control_plane, namespace, FETCHED), SECONDS, "progress")


def status_text(control_plane: ControlPlane, namespace: str, name: str) -> str:
    return str(get_service(control_plane, namespace, name).get("status"))


def follow_demand(control_plane: ControlPlane, namespace: str) -> None:
    autoscaled(control_plane, namespace, DEMANDED, {"minReplicas": 1, "maxReplicas": 2})
    control_plane.mark_pods_ready(namespace, f"{SERVICE_LABEL}={DEMANDED},{ROLE_LABEL}=router", 2, ago=LONG_AGO)
    wait_until(lambda: len(running(control_plane, namespace, engines(DEMANDED))) == 2, SECONDS, "a second engine")
    wait_until(lambda: "KVCacheDemand" in status_text(control_plane, namespace, DEMANDED), SECONDS, "it to be told")


def sleep_behind_the_gateway(control_plane: ControlPlane, namespace: str) -> None:
    idle = {"minReplicas": 0, "maxReplicas": 2, "scaleToZeroAfter": "1s"}
    autoscaled(control_plane, namespace, SHARED, idle, router={"mode": "gateway"})
    wait_until(lambda: not running(control_plane, namespace, engines(SHARED)), SECONDS, "the idle engine to go")


def autoscaled(
    control_plane: ControlPlane, namespace: str, name: str, autoscaling: dict[str, Any], **spec: Any
) -> None:
    """With one engine, which has been ready for long."""
    control_plane.apply(manifest(namespace, name, replicas=1, autoscaling=autoscaling, **spec))
    control_plane.mark_pods_ready(namespace, engines(name), 1, ago=LONG_AGO)
