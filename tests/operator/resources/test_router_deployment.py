"""The router's Deployment, Service and rights."""

from collections.abc import Callable
from typing import Any

from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.router_access import router_role, router_role_binding
from kvasir_operator.resources.router_command import router_command
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.resources.router_service import router_service, service_url
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]


def pod_spec(service: InferenceService) -> dict[str, Any]:
    spec: dict[str, Any] = router_deployment(service, OperatorSettings(router_image="router:2"))["spec"]["template"][
        "spec"
    ]
    return spec


def test_the_command_names_the_model_the_engines_and_the_queue(make_service: MakeService) -> None:
    router = {"policy": "roundRobin", "maxQueueSize": 7, "maxQueueWait": "500ms"}
    service = make_service(model={"source": "file:///m", "name": "big", "aliases": ["b"]}, router=router)

    assert router_command(service) == [
        *("kvasir-router", "serve", "--host", "0.0.0.0", "--port", "8080", "--admin-port", "9090"),
        *("--policy", "roundRobin", "--model", "big", "--model", "b"),
        *("--endpoints-service", "models/llama-engine:8000"),
        *("--max-queue-size", "7", "--max-queue-wait", "0.5", "--shutdown-timeout", "300"),
    ]


def test_api_keys_are_mounted_from_their_secret(make_service: MakeService) -> None:
    pod = pod_spec(make_service(router={"apiKeysSecretRef": {"name": "keys"}}))
    [container] = pod["containers"]

    assert {"name": "api-keys", "secret": {"secretName": "keys"}} in pod["volumes"]
    assert container["command"][-2:] == ["--api-keys-file", "/etc/kvasir/api-keys"]
    assert container["volumeMounts"][0]["mountPath"] == "/etc/kvasir/api-keys"


def test_probes_ask_the_admin_port(make_service: MakeService) -> None:
    [container] = pod_spec(make_service())["containers"]

    assert container["image"] == "router:2"
    assert {container[p]["httpGet"]["port"] for p in ("startupProbe", "readinessProbe", "livenessProbe")} == {"admin"}
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": 8080, "admin": 9090}


def test_a_leaving_router_outlives_its_streams(make_service: MakeService) -> None:
    assert pod_spec(make_service(rollout={"drainTimeout": "60s"}))["terminationGracePeriodSeconds"] > 60


def test_a_router_that_hangs_gets_no_time_to_drain_and_leaves_its_last_words(make_service: MakeService) -> None:
    [container] = pod_spec(make_service())["containers"]

    assert container["livenessProbe"]["terminationGracePeriodSeconds"] <= 10
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_images_are_pulled_with_the_operators_secrets(make_service: MakeService) -> None:
    deployment = router_deployment(make_service(), OperatorSettings(image_pull_secret=("mirror",)))

    assert deployment["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "mirror"}]


def test_two_routers_unless_told_otherwise(make_service: MakeService) -> None:
    assert router_deployment(make_service(), OperatorSettings())["spec"]["replicas"] == 2
    assert router_deployment(make_service(router={"replicas": 5}), OperatorSettings())["spec"]["replicas"] == 5


def test_the_router_may_see_endpoint_slices_and_nothing_else(make_service: MakeService) -> None:
    [rule] = router_role(make_service())["rules"]
    binding = router_role_binding(make_service())

    assert (rule["apiGroups"], rule["resources"]) == (["discovery.k8s.io"], ["endpointslices"])
    assert set(rule["verbs"]) == {"get", "list", "watch"}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "llama-router", "namespace": "models"}]
    assert binding["roleRef"]["name"] == "llama-router"


def test_clients_find_the_router_by_its_service(make_service: MakeService) -> None:
    [port] = router_service(make_service())["spec"]["ports"]

    assert (port["name"], port["port"]) == ("http", 8080)
    assert service_url(make_service()) == "http://llama-router.models.svc:8080/v1"
