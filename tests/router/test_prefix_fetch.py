"""A request whose engine lacks a prefix that a peer has cached, as engines, clients and the router's books see it."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.router.prefix_index.publisher import Publisher, publishing

from kvasir_router.config import KvEventPorts

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
SIZE = 16
NUM_TOKENS = 2000
NUM_CACHED = 1600
TOKENS = [number % 251 for number in range(NUM_TOKENS)]
BODY = {"model": "tiny", "prompt": TOKENS, "max_tokens": 5}


@pytest.fixture
async def pair(engines: list[Any]) -> list[Any]:
    """A holder and another, on hosts of their own, as pods are, so that they can publish on the same ports."""
    for engine, host in zip(engines, ("127.0.0.1", "127.0.0.2"), strict=True):
        await engine.stop()
        engine.host, engine.port = host, 0
        await engine.start()
    return engines


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    with publishing() as one, publishing(one.event_port, one.replay_port, host="127.0.0.2") as two:
        yield [one, two]


@pytest.fixture
def start(pair: list[Any], publishers: list[Publisher], start_router: Any, until: Any) -> Any:
    """start(ports, num_cached, **flags): a router that knows what each engine says of itself."""

    async def started(
        ports: tuple[int | None, int | None] = (5600, 5601), num_cached: int = NUM_CACHED, **flags: Any
    ) -> Any:
        events = KvEventPorts(publishers[0].event_port, publishers[0].replay_port)
        router = await start_router(*pair, **{"kv_events": events, "policy": "roundRobin"} | flags)
        service = service_of(router)
        await until(lambda: all(service.following.describe(engine.url)["is_complete"] for engine in pair))
        publishers[0].publish(stored(num_cached))
        for publisher, port in zip(publishers, ports, strict=True):
            publisher.send(b"kvasir-load", 0, idle_with(port))
        await until(lambda: service.index.num_blocks(pair[0].url) == num_cached // SIZE)
        await until(lambda: all(service.following.describe(engine.url)["num_load_reports"] for engine in pair))
        return router

    return started


def stored(num_tokens: int) -> list[Any]:
    digests = [f"block {number}".encode() for number in range(num_tokens // SIZE)]
    return ["BlockStored", digests, None, TOKENS[: len(digests) * SIZE], SIZE, None, "GPU"]


def idle_with(port: int | None) -> bytes:
    return msgspec.msgpack.encode([1, 0, 0, 0, 0, 0, 60_000, 7.5, None, [], "instance", 1, port])


def service_of(router: Any) -> Any:
    (service,) = router.services
    return service


async def ask(client: Any, router: Any, **fields: Any) -> int:
    async with client.post(router.url + URL, json=BODY | fields) as response:
        await response.read()
        return int(response.status)


async def count(client: Any, router: Any, name: str) -> float:
    async with client.get(router.admin_url + "/metrics") as response:
        [line] = [line for line in (await response.text()).splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


async def test_the_engine_that_lacks_the_prefix_is_told_of_the_peer_that_has_it(
    pair: list[Any], start: Any, client: Any
) -> None:
    holder, other = pair
    router = await start()
    for _ in pair:
        assert await ask(client, router) == 200
    assert holder.requests == [BODY]
    told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1", "remote_port": 5600}
    assert other.requests == [BODY | {"kv_transfer_params": told}]
    assert await count(client, router, "kvasir_router_prefix_fetches_total") == 1
    assert await count(client, router, "kvasir_router_prefix_fetch_tokens_total") == NUM_CACHED


@pytest.mark.parametrize(
    ("why", "options", "fields"),
    [
        ("the holder exchanges no KV", {"ports": (None, 5601)}, {}),
        ("the other exchanges no KV", {"ports": (5600, None)}, {}),
        ("the holder has too little", {"num_cached": 240}, {}),
        ("the router is told not to", {"kv_transfer_port": 0}, {}),
        ("two answers are asked for", {}, {"n": 2}),
    ],
)
async def test_else_every_engine_gets_the_clients_body(
    pair: list[Any], start: Any, client: Any, why: str, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    router = await start(**options)
    for _ in pair:
        assert await ask(client, router, **fields) == 200
    assert [engine.requests for engine in pair] == [[BODY | fields], [BODY | fields]], why


async def test_the_cheapest_placement_may_be_one_that_fetches(pair: list[Any], start: Any, client: Any) -> None:
    holder, other = pair
    router = await start(policy="finishTime")
    service = service_of(router)
    assert await ask(client, router) == 200
    load = service.registry.get(holder.url).load
    load.prefill_done_at = load.prefill_rest_seconds = 1e9
    assert await ask(client, router, stream=True) == 200
    assert [len(engine.requests) for engine in pair] == [1, 1]
    assert other.requests[0]["kv_transfer_params"]["remote_port"] == 5600


async def test_where_the_first_attempt_fails_the_holder_computes_no_more_than_ever(
    pair: list[Any], start: Any, client: Any
) -> None:
    holder, other = pair
    router = await start()
    other.die_before_headers = True
    for _ in pair:
        assert await ask(client, router) == 200
    assert [request.get("kv_transfer_params") for request in holder.requests] == [None, None]
    assert len(other.requests) == 1


async def test_a_stream_whose_engine_died_does_not_ask_that_engine(pair: list[Any], start: Any, client: Any) -> None:
    holder, other = pair
    router = await start(policy="finishTime")
    holder.keeps_journal = other.keeps_journal = True
    holder.die_after_tokens = 2
    assert await ask(client, router, stream=True) == 200
    assert [len(engine.requests) for engine in pair] == [1, 1]
    assert "kv_transfer_params" not in other.requests[0]


@pytest.mark.parametrize("is_late", [False, True])
async def test_first_tokens_teach_what_a_pairs_transfers_take(
    pair: list[Any], start: Any, client: Any, is_late: bool
) -> None:
    router = await start()
    fetching = service_of(router).fetching
    holder, other = pair
    before = fetching.transfers.estimate_seconds(holder.url, other.url, NUM_CACHED)
    for _ in pair:
        await ask(client, router, stream=is_late)
    after = fetching.transfers.estimate_seconds(holder.url, other.url, NUM_CACHED)
    assert (after != before) == is_late, "of an answer in one piece the first byte tells nothing"


@pytest.mark.parametrize("options", [{}, {"ports": (None, None)}, {"kv_transfer_port": 0}])
async def test_a_client_may_not_say_whom_to_ask_whatever_is_known_of_the_engines(
    pair: list[Any], start: Any, client: Any, options: dict[str, Any]
) -> None:
    router = await start(**options)
    own = {"remote_host": "10.0.0.7", "remote_port": 5600}
    async with client.post(router.url + URL, json=BODY | {"kv_transfer_params": own}) as response:
        assert response.status == 400
        assert json.loads(await response.read())["error"]["param"] == "kv_transfer_params"
    assert await ask(client, router, kv_transfer_params=None) == 200
    [request] = [request for engine in pair for request in engine.requests]
    assert request.get("kv_transfer_params", "none") is not None, "null says nothing"
