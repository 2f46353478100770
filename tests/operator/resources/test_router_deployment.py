"""The router's Deployment, Service and rights."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvasir_operator.api.defaults import GatewayDefaults
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import router_role
from kvasir_operator.resources.router_command import router_command
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.resources.service_accounts import router_role_binding, router_service_account
from kvasir_operator.resources.services import router_peers_service, router_service, service_url
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings(router_image="router:2")


def render(service: InferenceService) -> dict[str, Any]:
    return router_deployment(service, router_role(service, SETTINGS.defaults), SETTINGS)


def pod_spec(service: InferenceService) -> dict[str, Any]:
    spec: dict[str, Any] = render(service)["spec"]["template"]["spec"]
    return spec


def test_the_command_names_the_model_the_engines_and_the_queue(make_service: MakeService) -> None:
    router = {"policy": "roundRobin", "maxQueueSize": 7, "maxQueueWait": "500ms"}
    service = make_service(model={"source": "file:///m", "name": "big", "aliases": ["b", "c"]}, router=router)

    assert router_command(service) == [
        *("kvasir-router", "serve", "--host", "::", "--port", "8080", "--admin-port", "9090"),
        *("--policy", "roundRobin", "--model", "big", "--model-alias", "b", "--model-alias", "c"),
        *("--endpoints-service", "models/llama:8000"),
        *("--kv-events", "5557:5657"),
        *("--peers", "llama-router-peers.models.svc:5559"),
        *("--max-queue-size", "7", "--max-queue-wait", "0.5"),
        *("--sse-keepalive-interval", "20"),
        *("--shutdown-delay", "10", "--shutdown-timeout", "300"),
    ]


def test_api_keys_are_mounted_from_their_secret(make_service: MakeService) -> None:
    pod = pod_spec(make_service(router={"apiKeysSecretRef": {"name": "keys"}}))
    [container] = pod["containers"]

    assert {"name": "api-keys", "secret": {"secretName": "keys"}} in pod["volumes"]
    assert container["command"][-2:] == ["--api-keys-file", "/etc/kvasir/api-keys"]
    assert container["volumeMounts"][0]["mountPath"] == "/etc/kvasir/api-keys"


def test_limits_to_tenants_are_flags_of_their_own(make_service: MakeService) -> None:
    keys = {"apiKeysSecretRef": {"name": "keys"}}
    both, one = (
        router_command(make_service(router=keys | {"tenantLimits": limits}))
        for limits in ({"tokensPerMinute": 60000, "maxInFlight": 8}, {"maxInFlight": 1})
    )

    assert both[-4:] == ["--tenant-tokens-per-minute", "60000", "--tenant-max-in-flight", "8"]
    assert one[-2:] == ["--tenant-max-in-flight", "1"]
    assert "--tenant-tokens-per-minute" not in one


def test_probes_ask_the_admin_port(make_service: MakeService) -> None:
    [container] = pod_spec(make_service())["containers"]

    assert container["image"] == "router:2"
    assert {container[p]["httpGet"]["port"] for p in ("startupProbe", "readinessProbe", "livenessProbe")} == {"admin"}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8080, "admin": 9090, "peers": 5559}


def test_a_leaving_router_outlives_its_streams(make_service: MakeService) -> None:
    assert pod_spec(make_service(rollout={"drainTimeout": "60s"}))["terminationGracePeriodSeconds"] > 60


def test_a_leaving_router_takes_connections_until_nobody_opens_any_to_it(make_service: MakeService) -> None:
    plain = pod_spec(make_service(rollout={"drainTimeout": "60s", "drainDelay": "30s"}))
    [container] = plain["containers"]
    delay_flag = container["command"].index("--shutdown-delay")

    assert container["command"][delay_flag + 1] == "30"
    assert plain["terminationGracePeriodSeconds"] > 60 + 30


def test_a_router_that_hangs_gets_no_time_to_drain_and_leaves_its_last_words(make_service: MakeService) -> None:
    [container] = pod_spec(make_service())["containers"]

    assert container["livenessProbe"]["terminationGracePeriodSeconds"] <= 10
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_two_routers_unless_told_otherwise(make_service: MakeService) -> None:
    assert render(make_service())["spec"]["replicas"] == 2
    assert render(make_service(router={"replicas": 5}))["spec"]["replicas"] == 5


@pytest.mark.parametrize(("namespace", "kind"), [((), "ClusterRole"), (("models", "other"), "Role")])
def test_the_routers_account_is_bound_to_the_installations_role(
    make_service: MakeService, namespace: tuple[str, ...], kind: str
) -> None:
    service, settings = make_service(), OperatorSettings(namespace=namespace, router_cluster_role="release-router")
    binding = router_role_binding(service, router_role(service, settings.defaults), settings)

    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "llama-router", "namespace": "models"}]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (kind, "release-router")


def test_an_account_that_the_manifest_names_is_used_and_bound_and_not_made(make_service: MakeService) -> None:
    service = make_service(router={"pod": {"serviceAccountName": "mine"}})
    role = router_role(service, SETTINGS.defaults)

    assert pod_spec(service)["serviceAccountName"] == "mine"
    assert router_role_binding(service, role, SETTINGS)["subjects"][0]["name"] == "mine"
    assert router_service_account(service, role) is None


def test_the_router_has_an_account_of_its_own_otherwise(make_service: MakeService) -> None:
    service = make_service()
    account = router_service_account(service, router_role(service, SETTINGS.defaults))

    assert account is not None
    assert account["metadata"]["name"] == pod_spec(service)["serviceAccountName"]
    assert not account["automountServiceAccountToken"]
    assert pod_spec(service)["automountServiceAccountToken"]


def test_clients_find_the_router_by_its_service(make_service: MakeService) -> None:
    [port] = router_service(make_service())["spec"]["ports"]

    assert (port["name"], port["port"]) == ("http", 8080)
    assert service_url(make_service(), None) == "http://llama-router.models.svc:8080/v1"


def test_routers_find_one_another_by_a_service_that_names_each_pod(make_service: MakeService) -> None:
    """Ready or not: one that drains goes on telling where its streams are."""
    service = make_service()
    found, pod = router_peers_service(service), render(service)["spec"]["template"]
    host, port = dict(pairwise(router_command(service)))["--peers"].split(":")
    [listening] = [each for each in pod["spec"]["containers"][0]["ports"] if each["name"] == "peers"]

    assert host == f"{found['metadata']['name']}.{found['metadata']['namespace']}.svc"
    assert (found["spec"]["clusterIP"], found["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert found["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert int(port) == found["spec"]["ports"][0]["port"] == listening["containerPort"]


def test_clients_of_a_service_behind_the_gateway_use_the_gateways_address(make_service: MakeService) -> None:
    service, gateway = make_service(router={"mode": "gateway"}), GatewayDefaults("kvasir", "shared", {})

    assert service_url(service, gateway) == "http://shared.kvasir.svc:8080/v1"
    assert service_url(service, None) is None
    assert service_url(make_service(), gateway) == "http://llama-router.models.svc:8080/v1"


def test_the_service_is_of_the_manifests_type_with_its_annotations(make_service: MakeService) -> None:
    wanted = {"type": "LoadBalancer", "annotations": {"cloud.example/internal": "true"}}
    plain, public = (router_service(make_service(router={"service": service})) for service in ({}, wanted))

    assert (plain["spec"]["type"], public["spec"]["type"]) == ("ClusterIP", "LoadBalancer")
    assert public["metadata"]["annotations"] == {"cloud.example/internal": "true"}
    assert "annotations" not in plain["metadata"]
    assert plain["spec"]["ipFamilyPolicy"] == "PreferDualStack"


@pytest.mark.parametrize(("min_tokens", "text"), [("auto", "auto"), (512, "512"), (0, "0")])
def test_the_router_of_a_split_service_knows_where_to_ask_for_kv(
    make_service: MakeService, min_tokens: str | int, text: str
) -> None:
    split = {"prefill": {}, "decode": {}, "remotePrefillMinTokens": min_tokens}
    flags = dict(pairwise(router_command(make_service(disaggregation=split))))

    assert (flags["--kv-transfer-port"], flags["--remote-prefill-min-tokens"]) == ("5600", text)
    assert "--kv-transfer-port" not in router_command(make_service())


def test_routers_follow_all_engines_on_one_pair_of_ports(make_service: MakeService) -> None:
    """Whatever their ranks: the gateway follows all services by one flag."""
    specs: list[dict[str, Any]] = [{}, {"parallelism": {"data": 2}}, {"disaggregation": {"prefill": {}, "decode": {}}}]

    for spec in specs:
        assert ("--kv-events", "5557:5657") in pairwise(router_command(make_service(**spec)))
