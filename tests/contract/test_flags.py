"""The operator tells the other two programs everything by flags; they must understand every flag that it writes."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from kvasir_operator.api.model import InferenceService, RouterSpec
from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.roles import engine_roles, router_role
from kvasir_operator.manifests import load_services
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.settings import OperatorSettings
from kvasir_router.cli import parse_arguments
from kvasir_router.config import HostPort, KvEventPorts, PolicyName, RouterConfig
from kvasir_runtime.config import RuntimeConfig, check_values
from kvasir_runtime.flags import Parser, add_flags, config_from

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SETTINGS = OperatorSettings()
# What a pod would be told of itself.
FIELDS = {
    "KVASIR_NODE_RANK": "1",
    "KVASIR_GROUP": "llama-serve-0123456789-0",
    "KVASIR_REVISION": "0123456789",
    "POD_IP": "10.0.0.7",
}
# Every field that becomes a flag, set to something else than its default.
EVERY_FLAG: dict[str, Any] = {
    "model": {"source": "pvc://models/big", "name": "big", "aliases": ["b", "c"]},
    "engine": {
        "dtype": "bfloat16",
        "maxModelLen": 4096,
        "maxNumSeqs": 8,
        "maxNumBatchedTokens": 512,
        "memoryUtilization": 0.8,
        "scheduling": "priority",
        "kvCache": {"blockSize": 32, "prefixCaching": False},
        "speculative": {"method": "draftModel", "model": "pvc://drafts", "numTokens": 2},
    },
    "router": {
        "apiKeysSecretRef": {"name": "keys"},
        "tenantLimits": {"tokensPerMinute": 60000, "maxInFlight": 8},
        "maxQueueSize": 7,
        "maxQueueWait": "500ms",
        "policy": "roundRobin",
    },
    "rollout": {"drainTimeout": "2m"},
}


def runtime_configs(service: InferenceService) -> list[RuntimeConfig]:
    parser = Parser(prog="kvasir-runtime")
    add_flags(parser)
    templates = [engine_pod_template(service, role, SETTINGS) for role in engine_roles(service, SETTINGS.defaults)]
    return [config_from(parser.parse_all(arguments(template, "kvasir-runtime")[1:])) for template in templates]


def router_config(service: InferenceService) -> RouterConfig:
    deployment = router_deployment(service, router_role(service, SETTINGS.defaults), SETTINGS)
    return parse_arguments(arguments(deployment["spec"]["template"], "kvasir-router"))


def arguments(template: dict[str, Any], program: str) -> list[str]:
    """Without the program's name, and with `$(NAME)` as a kubelet would have it."""
    [container] = template["spec"]["containers"]
    named = {variable["name"] for variable in container["env"]}
    name, *rest = [re.sub(r"\$\((\w+)\)", lambda found: FIELDS[found[1]], each) for each in container["command"]]
    assert named >= {found for each in container["command"] for found in re.findall(r"\$\((\w+)\)", each)}
    assert (name, rest[0]) == (program, "serve")
    return rest


@pytest.fixture
def every_flag() -> InferenceService:
    metadata = {"name": "llama", "namespace": "models"}
    kind = {"apiVersion": "serving.kvasir.dev/v1alpha1", "kind": "InferenceService"}
    return parse_service({**kind, "metadata": metadata, "spec": EVERY_FLAG})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_runtime_understands_the_engine_pods_flags(example: Path) -> None:
    configs = [config for service in load_services(example) for config in runtime_configs(service)]

    assert configs
    assert {(config.server.host, config.server.port) for config in configs} == {("::", 8000)}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_router_understands_the_router_pods_flags(example: Path) -> None:
    for service in load_services(example):
        config = router_config(service)
        assert (config.host, config.port, config.admin_port) == ("::", 8080, 9090)
        assert config.endpoints_service == f"{service.namespace}/{service.name}:8000"


def test_engines_publish_kv_events_and_load(every_flag: InferenceService) -> None:
    [config] = runtime_configs(every_flag)
    check_values(config)
    events = config.cache.kv_events_config

    assert events is not None
    assert events.is_on
    assert (events.endpoint, events.replay_endpoint, events.load_hz) == ("tcp://*:5557", "tcp://*:5558", 20)


def test_the_runtime_reads_what_the_manifest_says(every_flag: InferenceService) -> None:
    [config] = runtime_configs(every_flag)

    assert config.model.served_model_name == ("big",)
    assert config.server.shutdown_timeout == 120


def test_the_router_reads_what_the_manifest_says(every_flag: InferenceService) -> None:
    config = router_config(every_flag)

    assert (config.model, config.model_alias) == ("big", ("b", "c"))
    assert config.kv_events == KvEventPorts(5557, 5558)
    assert config.peers == HostPort("llama-router-peers.models.svc", 5559)
    assert (config.policy, config.max_queue_size, config.max_queue_wait) == ("roundRobin", 7, 0.5)
    assert (config.api_keys_file, config.shutdown_timeout) == (Path("/etc/kvasir/api-keys"), 120)
    assert (config.tenant_tokens_per_minute, config.tenant_max_in_flight) == (60000, 8)


def test_the_router_has_every_policy_of_the_manifest() -> None:
    [policies] = [get_args(hint) for name, hint in get_type_hints(RouterSpec).items() if name == "policy"]
    assert set(policies) == set(get_args(PolicyName))


SPLIT: dict[str, Any] = {"prefill": {}, "decode": {}, "remotePrefillMinTokens": 512}


def test_the_router_of_a_split_service_pairs_where_the_engines_listen() -> None:
    metadata = {"name": "llama", "namespace": "models"}
    kind = {"apiVersion": "serving.kvasir.dev/v1alpha1", "kind": "InferenceService"}
    spec = {"model": {"source": "pvc://models/big"}, "disaggregation": SPLIT}
    config = router_config(parse_service({**kind, "metadata": metadata, "spec": spec}))

    assert (config.kv_transfer_port, config.remote_prefill_min_tokens) == (5600, 512)
