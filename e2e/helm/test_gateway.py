"""The gateway, as helm renders and installs it: off unless asked for, safe as any router of ours, its secret kept."""

from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from e2e.helm.helm import CHART, Helm, HelmError
from e2e.helm.installed import running_installed
from e2e.helm.test_files import of_kind, operator_container, pod_defaults
from e2e.helm.test_rights import account, granted
from tests.controlplane.control_plane import ControlPlane
from tests.controlplane.processes import wait_until
from tests.controlplane.reconciling import conditions, get_service, manifest
from tests.controlplane.rights import refused

from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.roles import router_role
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.settings import OperatorSettings

NAME = "kvasir-gateway"
ENABLED = ("--set", "gateway.enabled=true")
TUNED = ("--values", CHART / "ci" / "gateway-values.yaml")
PODS = "app.kubernetes.io/component=gateway"


def gateways(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [obj for obj in of_kind(objects, kind) if obj["metadata"]["name"] == NAME]


def container_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    [deployment] = gateways(objects, "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def test_nothing_of_it_is_made_unless_it_is_asked_for(offline_helm: Helm) -> None:
    objects = offline_helm.template()
    assert [obj for obj in objects if obj["metadata"]["name"] == NAME] == []
    assert "gateway" not in pod_defaults(objects)
    assert "KVASIR_GATEWAY_SECRET" not in {each["name"] for each in operator_container(objects)["env"]}


def test_all_of_it_is_made_together(offline_helm: Helm) -> None:
    objects = offline_helm.template(*ENABLED, "--api-versions=monitoring.coreos.com/v1/PodMonitor")
    assert sorted(obj["kind"] for obj in objects if obj["metadata"]["name"] == NAME) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "PodMonitor",
        "Secret",
        "Service",
        "ServiceAccount",
    ]


def test_the_operator_is_told_where_it_is_and_has_its_secret(offline_helm: Helm) -> None:
    objects = offline_helm.template(*ENABLED)
    [deployment] = gateways(objects, "Deployment")
    selector = deployment["spec"]["selector"]["matchLabels"]
    expected = {"namespace": "kvasir-system", "name": NAME, "podLabels": selector}
    [operator] = [each for each in of_kind(objects, "Deployment") if each["metadata"]["name"] == "kvasir-operator"]
    [container] = operator["spec"]["template"]["spec"]["containers"]
    assert pod_defaults(objects)["gateway"] == expected
    secrets = [
        [each["valueFrom"] for each in of["env"] if each["name"] == "KVASIR_GATEWAY_SECRET"]
        for of in (container, container_of(objects))
    ]
    assert secrets == [[{"secretKeyRef": {"name": NAME, "key": "secret"}}]] * 2
    assert deployment["spec"]["template"]["metadata"]["labels"].items() >= selector.items()


def test_its_pods_live_and_end_as_those_of_a_services_own_router(offline_helm: Helm) -> None:
    service = parse_service(manifest("models", rollout={"drainTimeout": "300s"}))
    own = router_deployment(service, router_role(service, OperatorSettings().defaults), OperatorSettings())
    own_pod = own["spec"]["template"]["spec"]
    [own_container] = own_pod["containers"]
    objects = offline_helm.template(*ENABLED)
    [deployment], container = gateways(objects, "Deployment"), container_of(objects)
    same = ("startupProbe", "readinessProbe", "livenessProbe", "ports", "terminationMessagePolicy")
    assert {key: container[key] for key in same} == {key: own_container[key] for key in same}
    assert container["securityContext"] == own_container["securityContext"]
    pod = deployment["spec"]["template"]["spec"]
    same = ("terminationGracePeriodSeconds", "securityContext", "nodeSelector", "automountServiceAccountToken")
    assert {key: pod[key] for key in same} == {key: own_pod[key] for key in same}
    assert deployment["spec"]["strategy"] == own["spec"]["strategy"]


def test_it_serves_the_namespaces_that_the_operator_serves(offline_helm: Helm) -> None:
    namespaced = offline_helm.template("--values", CHART / "ci" / "namespaced-values.yaml", *ENABLED)
    assert [
        each for each in container_of(offline_helm.template(*ENABLED))["args"] if each.startswith("--gateway=")
    ] == ["--gateway=*"]
    assert [each for each in container_of(namespaced)["args"] if each.startswith("--gateway=")] == [
        "--gateway=models",
        "--gateway=more-models",
    ]
    assert of_kind(namespaced, "ClusterRole") == []
    roles = {role["metadata"]["namespace"]: role["rules"] for role in gateways(namespaced, "Role")}
    assert set(roles) == {"models", "more-models", "kvasir-system"}
    # The operator's, by which it sees whether the gateway is ready and what it holds.
    look, ask = roles["kvasir-system"]
    assert (look["resources"], look["resourceNames"], look["verbs"]) == (["deployments"], [NAME], ["get"])
    assert (ask["resources"], ask["verbs"]) == (["pods"], ["list"])


def test_values_reach_its_objects(offline_helm: Helm) -> None:
    objects = offline_helm.template(*TUNED)
    [deployment], [service] = gateways(objects, "Deployment"), gateways(objects, "Service")
    pod, container = deployment["spec"]["template"]["spec"], container_of(objects)
    assert of_kind(objects, "Secret") == []
    assert {"name": "KVASIR_GATEWAY_SECRET", "valueFrom": {"secretKeyRef": {"name": "gateway", "key": "secret"}}} in (
        container["env"]
    )
    assert container["args"][-5:] == [
        "--shutdown-timeout=60",
        "--api-keys-file=/etc/kvasir/api-keys",
        "--tenant-tokens-per-minute=1000000",
        "--tenant-max-in-flight=8",
        "--max-connections=16384",
    ]
    assert {"name": "api-keys", "secret": {"secretName": "clients"}} in pod["volumes"]
    assert pod["nodeSelector"] == {"pool": "edge", "kubernetes.io/arch": "arm64"}
    assert (pod["serviceAccountName"], pod["terminationGracePeriodSeconds"]) == ("gate", 10 + 60 + 15)
    assert (service["spec"]["type"], service["metadata"]["annotations"]) == (
        "LoadBalancer",
        {"cloud.example/internal": "true"},
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("gateway.enable=true", "enable"),
        ("gateway.replicas=-1", "replicas"),
        ("gateway.service.type=ExternalName", "type"),
        ("gateway.extraArgs={policy}", "extraArgs"),
        ("gateway.drainTimeoutSeconds=5m", "drainTimeoutSeconds"),
    ],
)
def test_a_wrong_value_is_refused_by_name(offline_helm: Helm, given: str, name: str) -> None:
    with pytest.raises(HelmError) as refusal:
        offline_helm.template("--set", given)
    assert f"'{name}'" in str(refusal.value) or f"/{name}" in str(refusal.value)


def test_metrics_are_for_nobody_but_the_operator_where_nobody_is_named(offline_helm: Helm) -> None:
    objects = offline_helm.template(*ENABLED, "--set-json", "networkPolicies.metricsFrom=[]")
    [policy] = gateways(objects, "NetworkPolicy")
    [operator] = [each for each in of_kind(objects, "Deployment") if each["metadata"]["name"] == "kvasir-operator"]
    asker = {"podSelector": operator["spec"]["selector"]}
    peer = {"podSelector": policy["spec"]["podSelector"]}
    assert policy["spec"]["ingress"] == [
        {"ports": [{"port": "http", "protocol": "TCP"}]},
        {"ports": [{"port": "peers", "protocol": "TCP"}], "from": [peer]},
        {"ports": [{"port": "admin", "protocol": "TCP"}], "from": [asker]},
    ]


def secret_of(cluster: ControlPlane, namespace: str) -> str:
    data = cluster.request("get", f"/api/v1/namespaces/{namespace}/secrets/{NAME}")["data"]
    return b64decode(data["secret"]).decode()


def test_its_secret_is_drawn_once_and_outlives_upgrades_and_the_release(
    helm: Helm, cluster: ControlPlane, namespace: str
) -> None:
    helm.install(namespace, *ENABLED)
    drawn = secret_of(cluster, namespace)
    assert len(drawn) >= 43  # 256 bits of letters and digits
    helm.upgrade(namespace, *ENABLED, "--set", "operator.workers=9")
    assert secret_of(cluster, namespace) == drawn
    helm.upgrade(namespace)
    helm.upgrade(namespace, *ENABLED)
    assert secret_of(cluster, namespace) == drawn
    helm.uninstall(namespace)
    helm.install(namespace, *ENABLED)
    assert secret_of(cluster, namespace) == drawn


def test_it_may_see_services_and_their_engines_and_nothing_else(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str
) -> None:
    helm.install(namespace, *ENABLED)
    assert granted(cluster, account(namespace, NAME), other_namespace) == {
        ("serving.kvasir.dev", "inferenceservices", "list"),
        ("serving.kvasir.dev", "inferenceservices", "watch"),
        ("discovery.k8s.io", "endpointslices", "list"),
        ("discovery.k8s.io", "endpointslices", "watch"),
    }


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["cluster-wide", "namespaced"])
def test_the_operator_sees_it_and_serves_behind_it(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, is_namespaced: bool,
) -> None:  # fmt: skip
    helm.install(namespace, *ENABLED, *(("--set", f"watch.namespaces={{{other_namespace}}}") if is_namespaced else ()))
    monkeypatch.setenv("KVASIR_GATEWAY_SECRET", secret_of(cluster, namespace))
    with running_installed(cluster, namespace, tmp_path):
        cluster.apply(manifest(other_namespace, router={"mode": "gateway"}, replicas=0))
        wait_until(lambda: ready_reason(cluster, other_namespace) == "GatewayNotReady", 40, "the gateway to be missed")
        cluster.mark_pods_ready(namespace, PODS, 2)
        wait_until(lambda: ready_reason(cluster, other_namespace) == "Idle", 40, "the gateway to be seen")
    assert refused(cluster, account(namespace)) == []


def ready_reason(cluster: ControlPlane, namespace: str) -> str:
    service = get_service(cluster, namespace)
    return conditions(service)["Ready"][1] if "status" in service else ""


def test_limits_to_tenants_without_keys_that_tell_them_apart_are_refused(offline_helm: Helm) -> None:
    with pytest.raises(HelmError, match=r"set gateway\.apiKeysSecret too"):
        offline_helm.template(*ENABLED, "--set", "gateway.tenantLimits.maxInFlight=8")


def test_alerts_of_a_namespaced_release_speak_of_the_gateway_too(offline_helm: Helm) -> None:
    given = ("--values", CHART / "ci" / "namespaced-values.yaml", "--set", "monitoring.prometheusRule.enabled=true")
    [rule] = of_kind(offline_helm.template(*given, *ENABLED), "PrometheusRule")
    expressions = [each["expr"] for group in rule["spec"]["groups"][1:] for each in group["rules"]]
    assert all('namespace=~"models|more-models|kvasir-system"' in each for each in expressions)
