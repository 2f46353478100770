"""One router for the InferenceServices of a namespace: engines on real sockets, the Kubernetes API as the tests say."""

import asyncio
from typing import Any

import aiohttp
import pytest
from tests.router.kube_objects import ObjectStore, engine_slice, manifest
from tests.router.split_engines import Split

from kvasir_router.endpoints.slices import ROLE_LABEL
from kvasir_router.gateway import derived_secret
from kvasir_router.service.registry import EndpointState

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


class Cluster:
    """Whose namespace `models` a gateway follows."""

    def __init__(self) -> None:
        self.services = ObjectStore()
        self.engine_slices = ObjectStore()

    def inference_services(self, namespace: str | None) -> ObjectStore:
        assert namespace == "models"
        return self.services

    def slices(self, namespace: str | None) -> ObjectStore:
        assert namespace == "models"
        return self.engine_slices


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def gateway(cluster: Cluster, start_router: Any) -> Any:
    """start(**config) -> a gateway for everything in the cluster."""

    async def start(**config: Any) -> Any:
        return await start_router(gateway=("models",), kubernetes=cluster, **{"endpoint": (), **config})

    return start


async def ask(client: aiohttp.ClientSession, router: Any, model: str, **body: Any) -> tuple[int, bytes, str]:
    """Status, body and which engine answered."""
    asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], **body}
    async with client.post(router.url + CHAT, json=asked) as response:
        return response.status, await response.read(), response.headers.get("x-engine", "")


async def metrics(client: aiohttp.ClientSession, router: Any) -> str:
    async with client.get(router.admin_url + "/metrics") as response:
        return await response.text()


async def listed(client: aiohttp.ClientSession, router: Any) -> list[str]:
    async with client.get(router.url + "/v1/models") as response:
        return [card["id"] for card in (await response.json())["data"]]


async def serve_both(cluster: Cluster, engines: Any) -> None:
    """Two services with an engine each; the second is the later one."""
    for engine, name, day in zip(engines, ("llama", "qwen"), (1, 2), strict=True):
        engine.models = [name]
        await cluster.services.apply(manifest(name, created=f"2026-01-0{day}T00:00:00Z"))
        await cluster.engine_slices.apply(engine_slice(name, engine.port))


async def test_each_model_goes_to_its_services_engines(
    cluster: Cluster, gateway: Any, engines: Any, client: Any
) -> None:
    await serve_both(cluster, engines)
    router = await gateway()
    for _ in range(3):
        assert [(await ask(client, router, model))[2] for model in ("llama", "qwen")] == ["one", "two"]
    assert [request["model"] for request in engines[0].requests] == ["llama"] * 3


async def test_all_models_aliases_and_adapters_are_listed_even_at_zero(
    cluster: Cluster, gateway: Any, client: Any
) -> None:
    await cluster.services.apply(manifest("llama", aliases=("gpt",), adapters=("sql",)))
    await cluster.services.apply(manifest("qwen", created="2026-11-22T00:00:00Z"))
    router = await gateway()
    assert await listed(client, router) == ["llama", "gpt", "sql", "qwen"]
    async with client.get(router.url + "/v1/models/gpt") as response:
        card = await response.json()
    assert (card["root"], card["created"]) == ("llama", 1795255200)
    async with client.get(router.url + "/v1/models/nope") as response:
        assert response.status == 404


async def test_a_request_for_nobodys_model_or_for_none_is_refused(
    cluster: Cluster, gateway: Any, engines: Any, client: Any
) -> None:
    await serve_both(cluster, engines)
    router = await gateway()
    assert (await ask(client, router, "nope"))[0] == 404
    async with client.post(router.url + CHAT, json={"messages": []}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "model")


async def test_services_come_and_go_without_a_restart(
    cluster: Cluster, gateway: Any, engines: Any, client: Any, until: Any
) -> None:
    router = await gateway()
    assert await listed(client, router) == []
    await serve_both(cluster, engines)
    await until(lambda: len(list(router.services)) == 2)
    assert (await ask(client, router, "qwen"))[2] == "two"
    await cluster.services.delete(manifest("qwen"))
    await until(lambda: len(list(router.services)) == 1)
    assert (await ask(client, router, "qwen"))[0] == 404
    assert (await ask(client, router, "llama"))[2] == "one"


async def test_a_stream_of_a_service_that_is_gone_comes_to_its_end(
    cluster: Cluster, gateway: Any, engines: Any, client: Any, until: Any
) -> None:
    await serve_both(cluster, engines)
    engines[0].gate.clear()
    router = await gateway()
    answer = asyncio.create_task(ask(client, router, "llama", stream=True))
    await engines[0].wait_for_requests(1)
    await cluster.services.delete(manifest("llama"))
    await cluster.engine_slices.delete(engine_slice("llama"))
    await until(lambda: len(list(router.services)) == 1)
    engines[0].gate.set()
    status, body, _ = await answer
    assert (status, body) == (200, engines[0].stream_bytes(5) + b"data: [DONE]\n\n")


async def test_what_waits_for_a_service_that_is_gone_is_refused(
    cluster: Cluster, gateway: Any, client: Any, until: Any
) -> None:
    await cluster.services.apply(manifest("empty"))
    router = await gateway()
    waiting = asyncio.create_task(ask(client, router, "empty"))
    await until(lambda: router.services.num_waiting == 1)
    await cluster.services.delete(manifest("empty"))
    assert (await waiting)[0] == 404


async def test_a_service_that_gets_a_router_of_its_own_leaves_the_gateway(
    cluster: Cluster, gateway: Any, engines: Any, client: Any, until: Any
) -> None:
    await serve_both(cluster, engines)
    router = await gateway()
    await cluster.services.apply(manifest("qwen", mode="dedicated"))
    await until(lambda: len(list(router.services)) == 1)
    assert await listed(client, router) == ["llama"]


async def test_a_name_that_two_claim_goes_to_the_first_until_it_lets_it_go(
    cluster: Cluster, gateway: Any, engines: Any, client: Any, until: Any
) -> None:
    await serve_both(cluster, engines)
    old, new = ({"created": f"2026-01-0{day}T00:00:00Z", "aliases": ("gpt",)} for day in (1, 2))
    await cluster.services.apply(manifest("llama", **old))
    await cluster.services.apply(manifest("qwen", **new))
    router = await gateway()
    assert (await ask(client, router, "gpt"))[2] == "one"
    await cluster.services.apply(manifest("llama", created=old["created"]))
    await until(lambda: router.services.of("gpt").name == "models/qwen")
    assert (await ask(client, router, "gpt"))[2] == "two"


async def test_the_queue_of_a_service_is_its_own(
    cluster: Cluster, gateway: Any, engines: Any, client: Any, until: Any
) -> None:
    await serve_both(cluster, engines)
    await cluster.services.apply(manifest("empty", max_queue_size=1, max_queue_wait="10s"))
    router = await gateway()
    waiting = asyncio.create_task(ask(client, router, "empty"))
    await until(lambda: router.services.num_waiting == 1)
    assert (await ask(client, router, "empty"))[0] == 429
    assert (await ask(client, router, "llama"))[0] == 200
    engines[1].models = ["qwen", "empty"]
    await cluster.engine_slices.apply(engine_slice("empty", engines[1].port))
    assert (await waiting)[0] == 200


async def test_endpoints_and_queues_are_counted_by_service_as_long_as_it_is_there(
    cluster: Cluster, gateway: Any, engines: Any, client: Any, until: Any
) -> None:
    await serve_both(cluster, engines)
    router = await gateway()
    await until(lambda: router.services.num_in_state(EndpointState.READY) == 2)
    llama, qwen = (f'inference_service="{name}",service_namespace="models"' for name in ("llama", "qwen"))
    text = await metrics(client, router)
    for labels in (llama, qwen):
        assert f'kvasir_router_service_endpoints{{{labels},state="ready"}} 1.0' in text
        assert f"kvasir_router_service_queue_depth{{{labels}}} 0.0" in text
    await cluster.services.delete(manifest("qwen"))
    await until(lambda: len(list(router.services)) == 1)
    text = await metrics(client, router)
    assert llama in text
    assert qwen not in text


async def test_a_wake_is_counted_for_the_service_that_had_no_engine(
    cluster: Cluster, gateway: Any, engines: Any, client: Any, until: Any
) -> None:
    await serve_both(cluster, engines)
    await cluster.services.apply(manifest("empty", max_queue_wait="10s"))
    router = await gateway()

    async def num_wakes(name: str) -> float:
        prefix = f'kvasir_router_wake_seconds_count{{service="models/{name}"}} '
        [line] = [line for line in (await metrics(client, router)).splitlines() if line.startswith(prefix)]
        return float(line.removeprefix(prefix))

    waiting = [asyncio.create_task(ask(client, router, "empty")) for _ in range(2)]
    await until(lambda: router.services.num_waiting == 2)
    assert (await ask(client, router, "llama"))[0] == 200
    assert await num_wakes("empty") == 0
    engines[1].models = ["qwen", "empty"]
    await cluster.engine_slices.apply(engine_slice("empty", engines[1].port))
    assert [(await each)[0] for each in waiting] == [200, 200]
    assert (await ask(client, router, "empty"))[0] == 200
    assert (await num_wakes("empty"), await num_wakes("llama")) == (1, 0)


async def test_it_is_ready_once_it_knows_all_services(cluster: Cluster, gateway: Any, client: Any) -> None:
    router = await gateway()
    async with client.get(router.admin_url + "/ready") as response:
        assert response.status == 200
    router.is_synced = lambda: False
    async with client.get(router.admin_url + "/ready") as response:
        assert response.status == 503


async def test_new_settings_hold_for_the_next_request(
    cluster: Cluster, gateway: Any, engines: Any, client: Any, until: Any
) -> None:
    await cluster.services.apply(manifest("empty", max_queue_wait="10s"))
    router = await gateway()
    await cluster.services.apply(manifest("empty", max_queue_wait="20ms", aliases=("other",), policy="roundRobin"))
    await until(lambda: router.services.of("empty").catalog.names() == ("empty", "other"))
    assert (await ask(client, router, "other"))[0] == 503
    assert router.services.of("empty").policy == "roundRobin"


async def test_each_services_engines_know_the_gateway_by_a_secret_of_their_own(
    cluster: Cluster, gateway: Any, engines: Any, client: Any
) -> None:
    await serve_both(cluster, engines)
    router = await gateway(router_secret="gateway-secret")
    for model, engine in zip(("llama", "qwen"), engines, strict=True):
        await ask(client, router, model)
        assert engine.headers[0]["x-kvasir-router-secret"] == derived_secret("gateway-secret", f"models/{model}")
    assert engines[0].headers[0]["x-kvasir-router-secret"] != engines[1].headers[0]["x-kvasir-router-secret"]


async def test_a_manifest_that_cannot_be_read_takes_no_other_with_it(
    cluster: Cluster, gateway: Any, engines: Any, client: Any, caplog: Any
) -> None:
    await serve_both(cluster, engines)
    broken = manifest("broken")
    del broken["spec"]["router"]["policy"]
    await cluster.services.apply(broken)
    router = await gateway()
    assert await listed(client, router) == ["llama", "qwen"]
    assert "InferenceService models/broken is not served" in caplog.text


async def test_a_services_roles_are_paired_behind_the_gateway_by_its_own_rule(
    cluster: Cluster, gateway: Any, start_router: Any, client: Any, exit_stack: Any, until: Any
) -> None:
    [prefill], [decode] = await Split(start_router, exit_stack).start_engines(1, 1)
    await cluster.services.apply(manifest("llama", disaggregation={"remotePrefillMinTokens": 0}))
    for role, engine in (("prefill", prefill), ("decode", decode)):
        engine.models = ["llama"]
        listed_as = engine_slice("llama", engine.port, name=f"llama-{role}")
        listed_as["metadata"]["labels"][ROLE_LABEL] = role
        await cluster.engine_slices.apply(listed_as)
    router = await gateway()
    assert (await ask(client, router, "llama"))[2] == decode.name
    assert decode.received == [True]
    await cluster.services.apply(manifest("llama", disaggregation={"remotePrefillMinTokens": 10**6}))
    [service] = router.services
    await until(lambda: service.pairing.remote_min_tokens > 0)
    await ask(client, router, "llama")
    assert decode.received == [True, None]
