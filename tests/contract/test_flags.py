"""The operator tells the other two programs everything by flags; they must understand every flag that it writes."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from tests.contract.rendered import FIELDS, SETTINGS, router_config, runtime_configs, service_with

from kvasir_operator.api.engine_flags import ENGINE_FLAGS
from kvasir_operator.api.manifests import load_manifests
from kvasir_operator.api.model import InferenceService, ParallelismSpec, RouterSpec
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.desired.unsupported import unsupported_features
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_router.config import HostPort, KvEventPorts, PolicyName
from kvasir_runtime.cli import main
from kvasir_runtime.config_checks import check_values
from kvasir_runtime.engine.router_feed import at_rank

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
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
        "probes": {"timeoutSeconds": 4, "failureThreshold": 5, "hungAfterSeconds": 60},
        "maxQueueSize": 7,
        "maxQueueWait": "500ms",
        "sseKeepaliveInterval": "5s",
        "policy": "roundRobin",
    },
    "rollout": {"drainTimeout": "2m", "drainDelay": "20s"},
}


@pytest.fixture
def every_flag() -> InferenceService:
    return service_with(**EVERY_FLAG)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_runtime_understands_the_engine_pods_flags(example: Path) -> None:
    configs = [config for service in load_manifests(example).services for config in runtime_configs(service)]

    assert configs
    assert {(config.server.host, config.server.port) for config in configs} == {("::", 8000)}


def test_the_operator_knows_the_engines_flags_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    listed = re.findall(r"^  (-.*)", capsys.readouterr().out, re.MULTILINE)
    assert set(re.findall(r"--[a-z][a-z0-9-]*", " ".join(listed))) == ENGINE_FLAGS, "run make generate"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_router_understands_the_router_pods_flags(example: Path) -> None:
    for service in load_manifests(example).services:
        config = router_config(service)
        assert (config.host, config.port, config.admin_port) == ("::", 8080, 9090)
        assert config.endpoints_service == f"{service.namespace}/{service.name}:8000"


def test_engines_publish_kv_events_and_load(every_flag: InferenceService) -> None:
    [config] = runtime_configs(every_flag)
    check_values(config)
    events = config.cache.kv_events_config

    assert events is not None
    assert events.is_on
    assert (events.endpoint, events.replay_endpoint, events.load_hz) == ("tcp://*:5557", "tcp://*:5657", 20)


def test_as_many_ranks_as_a_manifest_may_ask_for_publish_on_ports_of_their_own() -> None:
    [bounds] = get_type_hints(ParallelismSpec, include_extras=True)["data"].__metadata__
    [config] = runtime_configs(service_with(model={"source": "pvc://m/big"}, parallelism={"data": bounds.maximum}))
    check_values(config)

    assert config.cache.kv_events_config is not None
    assert config.parallel.data_parallel_size == bounds.maximum


def test_the_runtime_reads_what_the_manifest_says(every_flag: InferenceService) -> None:
    [config] = runtime_configs(every_flag)

    assert config.model.served_model_name == ("big",)
    assert config.server.shutdown_timeout == 120


def test_the_router_reads_what_the_manifest_says(every_flag: InferenceService) -> None:
    config = router_config(every_flag)

    assert (config.model, config.model_alias) == ("big", ("b", "c"))
    assert config.kv_events == KvEventPorts(5557, 5657)
    assert config.peers == HostPort("llama-router-peers.models.svc", 5559)
    assert (config.policy, config.max_queue_size, config.max_queue_wait) == ("roundRobin", 7, 0.5)
    assert config.api_keys_file == Path("/etc/kvasir/api-keys")
    assert (config.shutdown_timeout, config.shutdown_delay, config.sse_keepalive_interval) == (120, 20, 5)
    assert (config.tenant_tokens_per_minute, config.tenant_max_in_flight) == (60000, 8)
    assert (config.probe_timeout, config.probe_failures, config.hung_after) == (4, 5, 60)


def test_the_router_has_every_policy_of_the_manifest() -> None:
    [policies] = [get_args(hint) for name, hint in get_type_hints(RouterSpec).items() if name == "policy"]
    assert set(policies) == set(get_args(PolicyName))


SPLIT: dict[str, Any] = {"prefill": {}, "decode": {}, "remotePrefillMinTokens": 512}


def test_the_router_of_a_split_service_pairs_where_the_engines_listen() -> None:
    config = router_config(service_with(model={"source": "pvc://models/big"}, disaggregation=SPLIT))

    assert (config.kv_transfer_port, config.remote_prefill_min_tokens) == (5600, 512)


@pytest.mark.parametrize("num_copies", [1, 2, 43])
def test_each_copy_of_an_engine_that_exchanges_kv_has_the_ports_that_its_pod_names(num_copies: int) -> None:
    split = {"prefill": {"parallelism": {"data": num_copies}}, "decode": {}}
    service = service_with(model={"source": "pvc://models/big"}, disaggregation=split)
    assert not unsupported_features(service)
    config, _ = runtime_configs(service)
    check_values(config)
    events, transfer = config.cache.kv_events_config, config.cache.kv_transfer_config
    assert events is not None
    assert transfer is not None
    ports = [8000]
    for rank in range(num_copies):
        of_rank = at_rank(events, rank)
        assert of_rank.replay_endpoint is not None
        ports += [int(endpoint.rpartition(":")[2]) for endpoint in (of_rank.endpoint, of_rank.replay_endpoint)]
        ports.append(transfer.kv_connector_extra_config.side_channel_port + rank)
    template = engine_pod_template(service, engine_roles(service, SETTINGS.defaults)[0], SETTINGS)
    named = [port["containerPort"] for port in template["spec"]["containers"][0]["ports"]]
    assert sorted(named) == sorted(ports)
    assert len(set(ports)) == 1 + 3 * num_copies


def test_engines_that_exchange_kv_give_and_take_within_their_revision() -> None:
    [config] = runtime_configs(service_with(model={"source": "pvc://models/big"}, engine={"kvTransfer": True}))

    transfer = config.cache.kv_transfer_config
    assert transfer is not None
    assert (transfer.can_produce, transfer.can_consume, transfer.kv_load_failure_policy) == (True, True, "recompute")
    extra = transfer.kv_connector_extra_config
    assert (extra.side_channel_host, extra.side_channel_port) == (FIELDS["POD_IP"], 5600)
    assert extra.revision == FIELDS["KVASIR_REVISION"]
