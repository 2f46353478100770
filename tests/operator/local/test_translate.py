"""Desired objects as local pods: programs, addresses, folders and environment of this machine."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.operator.gateways import WITH_GATEWAY

from kvasir_operator.api.manifests import load_manifests
from kvasir_operator.errors import LocalRunError
from kvasir_operator.local.network import LoopbackNetwork
from kvasir_operator.local.pods import Listener, LocalService
from kvasir_operator.local.translate import local_service
from kvasir_operator.local.volumes import Folders, write_data
from kvasir_operator.resources.router_secret import derived_secret
from kvasir_operator.settings import OperatorSettings

LISTEN = Listener("127.0.0.1", 8080)
Translate = Callable[..., LocalService]
Occupy = Callable[[int, int], object]


@pytest.fixture
def occupy(network: LoopbackNetwork) -> Iterator[Occupy]:
    """`occupy(number, port)`: another program listens there, at the address that the pod of this number will get."""
    prefix, _, last = network.next_address().rpartition(".")
    first = int(last) + 1
    with ExitStack() as stack:
        yield lambda number, port: stack.enter_context(socket.create_server((f"{prefix}.{first + number}", port)))


@pytest.fixture
def translate(write_manifest: Callable[..., Path], programs: Path, network: LoopbackNetwork) -> Translate:
    """A manifest with these groups of its spec, as local pods."""

    def make(**spec: Any) -> LocalService:
        file = write_manifest(**spec)
        [service] = load_manifests(file).services
        return local_service(service, OperatorSettings(), network, LISTEN, Folders(file.parent, programs))

    return make


def test_each_replica_is_a_pod_on_its_own_address(translate: Translate) -> None:
    service = translate(replicas=2, router={"replicas": 2})

    assert [pod.name for pod in service.engines] == ["llama-serve-0", "llama-serve-1"]
    assert [pod.name for pod in service.routers] == ["llama-router-0", "llama-router-1"]
    assert len({pod.listeners[0] for pod in (*service.engines, *service.routers)}) == 4


def test_the_engine_listens_on_its_address_and_loads_the_folder_beside_the_manifest(
    translate: Translate, programs: Path
) -> None:
    [engine] = translate().engines
    flags = dict(pairwise(engine.command))

    assert engine.command[:2] == (str(programs / "kvasir-runtime"), "serve")
    assert Path(engine.command[2]) == (programs.parent / "models" / "small").resolve()
    [listener] = engine.listeners[:1]  # on 8000, but where a program of the machine has that on every address
    assert (flags["--host"], flags["--port"]) == (listener.address, str(listener.port))
    assert engine.readiness.url == f"{listener.url}/ready"


def test_the_first_router_listens_where_clients_look_and_knows_every_engine(translate: Translate) -> None:
    service = translate(replicas=2)
    [router] = service.routers
    flags = list(pairwise(router.command))

    assert ("--host", "127.0.0.1") in flags
    assert ("--port", "8080") in flags
    assert [url for flag, url in flags if flag == "--endpoint"] == [pod.listeners[0].url for pod in service.engines]
    assert "--endpoints-service" not in router.command
    assert "--peers" not in router.command
    assert service.url == "http://127.0.0.1:8080/v1"


def test_the_routers_admin_port_stays_on_the_pods_own_address(translate: Translate) -> None:
    [router] = translate().routers
    flags = dict(pairwise(router.command))

    assert flags["--admin-host"].startswith("127.77.")
    assert flags["--admin-port"] == "9090"
    assert router.readiness.url == f"http://{flags['--admin-host']}:9090/ready"


def test_a_gpu_is_not_insisted_on_as_none_is_asked_for_here(translate: Translate) -> None:
    devices = [
        dict(pairwise(translate(engine={"device": device}).engines[0].command))["--device"]
        for device in ("auto", "cuda", "cpu")
    ]

    assert devices == ["auto", "cuda", "cpu"]


def test_the_model_and_its_aliases_are_the_routers_to_know(translate: Translate) -> None:
    service = translate(model={"source": "file:///models/small", "name": "big", "aliases": ["b"]})
    [engine], [router] = service.engines, service.routers

    assert ("--model", "big") in pairwise(router.command)
    assert ("--model-alias", "b") in pairwise(router.command)
    assert "b" not in engine.command
    assert service.model_names == ("big", "b")


def test_api_keys_are_read_from_a_folder_beside_the_manifest(translate: Translate, tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    [router] = translate(router={"replicas": 1, "apiKeysSecretRef": {"name": "keys"}}).routers

    assert ("--api-keys-file", str(tmp_path / "keys")) in pairwise(router.command)


def test_secrets_and_config_maps_of_the_files_stand_in_for_those_of_a_cluster(
    write_manifest: Callable[..., Path], programs: Path, network: LoopbackNetwork, tmp_path: Path
) -> None:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "models"}}
    keys = {"kind": "Secret", "metadata": {"name": "keys"}, "data": {"team": "c2stMQ=="}, "stringData": {"a": "sk-2"}}
    ca = {"kind": "ConfigMap", "metadata": {"name": "ca"}, "data": {"ca.crt": "PEM"}, "binaryData": {"b": "AAE="}}
    volumes = [{"mountPath": "/etc/own-ca", "configMap": {"name": "ca"}}]
    env = [{"name": "SSL_CERT_FILE", "value": "/etc/own-ca/ca.crt"}]
    file = write_manifest(router={"apiKeysSecretRef": {"name": "keys"}}, pod={"volumes": volumes, "env": env})
    [service] = load_manifests(file).services
    others = write_data([namespace, keys, ca], tmp_path / "run")
    local = local_service(
        service, OperatorSettings(), network, LISTEN, Folders(file.parent, programs, tmp_path / "run")
    )
    folder = Path(dict(pairwise(local.routers[0].command))["--api-keys-file"])

    assert {path.name: path.read_text() for path in folder.iterdir()} == {"team": "sk-1", "a": "sk-2"}
    assert Path(local.engines[0].env["SSL_CERT_FILE"]).read_text() == "PEM"
    assert Path(local.engines[0].env["SSL_CERT_FILE"]).with_name("b").read_bytes() == b"\x00\x01"
    assert others == [namespace]


def test_a_secret_that_is_not_base64_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalRunError, match=r"Secret keys: data\.team is not base64"):
        write_data([{"kind": "Secret", "metadata": {"name": "keys"}, "data": {"team": "sk-1"}}], tmp_path)


def test_an_engine_may_use_the_memory_of_its_pod(translate: Translate) -> None:
    [engine] = translate(resources={"memory": "2Gi"}).engines

    assert engine.memory_bytes == 2 * 1024**3


def test_a_path_in_the_environment_is_one_of_this_machine(translate: Translate, tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir()
    volumes = [{"mountPath": "/etc/own-ca", "configMap": {"name": "ca"}}]
    env = [{"name": "SSL_CERT_FILE", "value": "/etc/own-ca/ca.crt"}]
    [engine] = translate(pod={"volumes": volumes, "env": env}).engines

    assert engine.env["SSL_CERT_FILE"] == str(tmp_path / "ca" / "ca.crt")


def test_an_absolute_folder_is_taken_as_it_is(translate: Translate, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    [engine] = translate(model={"source": f"file://{folder}"}).engines

    assert Path(engine.command[2]) == folder.resolve()


def test_the_environment_is_the_machines_plus_the_manifests(
    translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    [engine] = translate(pod={"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}).engines

    assert engine.env["OMP_NUM_THREADS"] == "1"
    assert engine.env["HOME"] == "/home/me"


def test_router_and_engines_share_a_secret_that_each_run_draws_anew(translate: Translate) -> None:
    runs = [translate(replicas=2) for _ in range(2)]
    held = [{pod.env["KVASIR_ROUTER_SECRET"] for pod in (*run.engines, *run.routers)} for run in runs]

    assert [len(values) for values in held] == [1, 1]
    assert held[0] != held[1]
    assert all(value not in pod.command for run in runs for pod in run.engines for value in held[0] | held[1])


def test_the_draft_model_is_loaded_from_the_folder_beside_the_manifest(translate: Translate, tmp_path: Path) -> None:
    (tmp_path / "models" / "draft").mkdir()
    speculative = {"method": "draftModel", "model": "file:///models/draft", "numTokens": 3}
    [engine] = translate(engine={"device": "cpu", "speculative": speculative}).engines
    config = json.loads(dict(pairwise(engine.command))["--speculative-config"])

    assert config == {
        "method": "draft_model",
        "model": str((tmp_path / "models" / "draft").resolve()),
        "num_speculative_tokens": 3,
    }


def test_a_draft_model_that_is_not_there_is_named_by_its_field(translate: Translate) -> None:
    speculative = {"method": "draftModel", "model": "file:///models/gone"}
    with pytest.raises(LocalRunError, match=r"spec\.engine\.speculative\.model is file:///models/gone: neither"):
        translate(engine={"device": "cpu", "speculative": speculative})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"model": {"source": "file:///models/gone"}}, "neither /models/gone nor .*/models/gone is a folder"),
        ({"model": {"source": "pvc://claim"}}, "write file:///PATH"),
        ({"model": {"source": "oci://image"}}, "write file:///PATH"),
        (
            {"router": {"apiKeysSecretRef": {"name": "keys"}}},
            "Secret keys is in a cluster.* reads .*/keys in its place",
        ),
        ({"pod": {"volumes": [{"mountPath": "/ca", "configMap": {"name": "ca"}}]}}, "ConfigMap ca is in a cluster"),
        ({"pod": {"volumes": [{"mountPath": "/ca", "claim": {"name": "ca"}}]}}, r"spec\.pod\.volumes names a claim"),
        ({"replicas": 0}, "0 engine or router replicas"),
        (
            {"pod": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}},
            "spec.pod.env A has valueFrom",
        ),
        (
            {"pod": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "llama-router", "key": "other"}}}]}},
            "spec.pod.env A has valueFrom",
        ),
    ],
)
def test_refuses_what_only_a_cluster_has(translate: Translate, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(LocalRunError, match=message):
        translate(**spec)


def test_a_missing_program_is_named_with_what_to_install(
    translate: Translate, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (programs / "kvasir-runtime").unlink()
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(LocalRunError, match=r"install kvasir\[runtime\]"):
        translate()


def test_behind_the_gateway_engines_believe_what_it_shows_and_there_is_no_router(
    write_manifest: Callable[..., Path], programs: Path, network: LoopbackNetwork
) -> None:
    file = write_manifest(router={"mode": "gateway"})
    [service] = load_manifests(file).services
    local = local_service(service, WITH_GATEWAY, network, LISTEN, Folders(file.parent, programs))

    assert local.routers == ()
    assert local.url == "http://127.0.0.1:8080/v1"
    assert local.engines[0].env["KVASIR_ROUTER_SECRET"] == derived_secret("gateway-secret", "models", "llama")


def test_each_engine_publishes_kv_events_on_its_own_address(translate: Translate) -> None:
    engines = translate(replicas=2).engines
    configs = [json.loads(dict(pairwise(engine.command))["--kv-events-config"]) for engine in engines]

    assert [(config["endpoint"], config["replay_endpoint"]) for config in configs] == [
        (f"tcp://{engine.listeners[0].address}:5557", f"tcp://{engine.listeners[0].address}:5657") for engine in engines
    ]
    assert all(config["enable_kv_cache_events"] for config in configs)


def test_routers_follow_the_kv_events_of_engines_that_publish_on_one_pair_of_ports(translate: Translate) -> None:
    [router] = translate(replicas=2).routers

    assert ("--kv-events", "5557:5657") in pairwise(router.command)


def test_routers_follow_none_where_engines_had_to_take_different_ports(translate: Translate, occupy: Occupy) -> None:
    occupy(0, 5557)
    [router] = translate(replicas=2).routers

    assert "--kv-events" not in router.command


def test_data_parallel_ranks_publish_on_the_ports_behind_one_another(translate: Translate) -> None:
    service = translate(parallelism={"data": 2})
    config = json.loads(dict(pairwise(service.engines[0].command))["--kv-events-config"])

    assert [config[key].rpartition(":")[2] for key in ("endpoint", "replay_endpoint")] == ["5557", "5657"]
    assert ("--kv-events", "5557:5657") in pairwise(service.routers[0].command)


@pytest.mark.parametrize("taken", [5557, 5558, 5657, 5658])
def test_data_parallel_ranks_that_get_no_ports_behind_one_another_publish_nothing(
    translate: Translate, occupy: Occupy, taken: int
) -> None:
    occupy(0, taken)
    service = translate(parallelism={"data": 2})

    assert "--kv-events-config" not in service.engines[0].command
    assert "--kv-events" not in service.routers[0].command


def test_a_group_is_a_process_a_pod_and_each_knows_its_rank_and_where_the_first_is(translate: Translate) -> None:
    service = translate(parallelism={"pipeline": 2}, replicas=2)
    flags = {pod.name: dict(pairwise(pod.command)) for pod in service.engines}
    hosts = {name: flag["--host"] for name, flag in flags.items()}

    assert list(flags) == ["llama-serve-0-0", "llama-serve-0-1", "llama-serve-1-0", "llama-serve-1-1"]
    assert [flag["--node-rank"] for flag in flags.values()] == ["0", "1", "0", "1"]
    assert len(set(hosts.values())) == 4
    for name, flag in flags.items():
        assert flag["--master-addr"] == hosts[f"{name.rpartition('-')[0]}-0"]
        assert (flag["--nnodes"], flag["--master-port"]) == ("2", "29500")
    assert [(pod.replica, pod.rank) for pod in service.engines[:2]] == [("llama-serve-0", 0), ("llama-serve-0", 1)]


def test_tensor_ranks_beyond_the_devices_of_a_pod_are_processes_of_their_own(translate: Translate) -> None:
    service = translate(parallelism={"tensor": 2}, resources={"maxDevices": 1})
    first, second = (dict(pairwise(pod.command)) for pod in service.engines)

    assert [(pod.replica, pod.rank) for pod in service.engines] == [("llama-serve-0", 0), ("llama-serve-0", 1)]
    assert [flag["--node-rank"] for flag in (first, second)] == ["0", "1"]
    assert {flag["--master-addr"] for flag in (first, second)} == {first["--host"]}
    assert first["--host"] != second["--host"]


def test_routers_know_the_first_pod_of_each_group(translate: Translate) -> None:
    service = translate(parallelism={"pipeline": 2}, replicas=2)
    [router] = service.routers
    urls = [url for flag, url in pairwise(router.command) if flag == "--endpoint"]

    assert urls == [pod.listeners[0].url for pod in service.engines if pod.rank == 0]


def test_prefill_and_decode_exchange_kv_on_their_own_addresses(translate: Translate) -> None:
    service = translate(disaggregation={"prefill": {"replicas": 2}, "decode": {}})
    [router] = service.routers
    told = list(pairwise(router.command))

    for pod in service.engines:
        config = json.loads(dict(pairwise(pod.command))["--kv-transfer-config"])["kv_connector_extra_config"]
        assert config["side_channel_host"] == pod.listeners[0].address
        assert (config["side_channel_port"], config["revision"]) == (5600, "local")
    for flag, role in (("--prefill-endpoint", "prefill"), ("--decode-endpoint", "decode")):
        assert [url for key, url in told if key == flag] == [
            pod.listeners[0].url for pod in service.engines if pod.role == role
        ]
    assert ("--kv-transfer-port", "5600") in told


def test_pods_that_exchange_cached_prefixes_do_so_on_their_own_addresses(translate: Translate) -> None:
    service = translate(replicas=2, engine={"kvTransfer": True})
    [router] = service.routers
    places = set()

    for pod in service.engines:
        config = json.loads(dict(pairwise(pod.command))["--kv-transfer-config"])["kv_connector_extra_config"]
        places.add((config["side_channel_host"], config["side_channel_port"]))
    assert places == {(pod.listeners[0].address, 5600) for pod in service.engines}
    assert len(places) == 2
    assert "--kv-transfer-port" not in router.command, "engines tell their ports themselves"


def test_where_prefill_engines_had_to_take_different_ports_none_prefills_for_others(
    translate: Translate, occupy: Occupy
) -> None:
    occupy(0, 5600)
    [router] = translate(disaggregation={"prefill": {"replicas": 2}, "decode": {}}).routers

    assert ("--kv-transfer-port", "0") in pairwise(router.command)


@pytest.mark.parametrize(("taken", "port"), [(None, 5600), (5600, 0), (5601, 0)])
def test_data_parallel_ranks_exchange_kv_on_the_ports_behind_one_another(
    translate: Translate, occupy: Occupy, taken: int | None, port: int
) -> None:
    if taken is not None:
        occupy(0, taken)
        occupy(1, taken)
    split = {"prefill": {"parallelism": {"data": 2}}, "decode": {"parallelism": {"data": 2}}}
    service = translate(disaggregation=split)

    for engine in service.engines:
        config = dict(pairwise(engine.command)).get("--kv-transfer-config")
        assert (config is not None) == (port != 0)
        assert config is None or json.loads(config)["kv_connector_extra_config"]["side_channel_port"] == port
    assert ("--kv-transfer-port", str(port)) in pairwise(service.routers[0].command)


def test_a_pod_can_be_told_its_own_address(translate: Translate) -> None:
    env = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    [engine] = translate(pod={"env": env}).engines

    assert engine.env["A"] == engine.listeners[0].address


HUB = {"source": "hf://org/name", "cache": {"claim": "models"}}


def test_downloads_of_all_replicas_go_into_the_users_one_cache(
    translate: Translate, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    folder = str(tmp_path / "caches" / "kvasir" / "models" / "hf" / "org" / "name" / "main")
    engines = translate(model=HUB, replicas=2).engines

    for engine in engines:
        [init] = engine.inits
        assert init.command[:4] == (str(programs / "kvasir-runtime"), "fetch", "hf://org/name", folder)
        assert dict(pairwise(init.command))["--host"] == engine.listeners[0].address
        assert engine.command[2] == folder


def test_a_cache_of_the_node_is_that_folder(translate: Translate) -> None:
    [engine] = translate(model={"source": "s3://bucket/m", "cache": {"hostPath": "/var/models"}}).engines

    assert engine.command[2] == "/var/models/s3/bucket/m"


def test_the_secret_of_downloads_is_read_beside_the_manifest_and_is_the_loaders_alone(
    translate: Translate, tmp_path: Path
) -> None:
    (tmp_path / "hf-token").mkdir()
    (tmp_path / "hf-token" / "HF_TOKEN").write_text("hf_secret\n")
    service = translate(model=HUB | {"secretRef": {"name": "hf-token"}})
    [engine] = service.engines

    assert engine.inits[0].env["HF_TOKEN"] == "hf_secret"
    assert "hf_secret" not in str([engine.command, engine.env, engine.inits[0].command, service.routers])


def test_a_secret_of_downloads_that_is_not_there_is_named(translate: Translate) -> None:
    with pytest.raises(LocalRunError, match=r"Secret hf-token is in a cluster, and local mode reads .*/hf-token"):
        translate(model=HUB | {"secretRef": {"name": "hf-token"}})
