"""A request whose engine lacks a prefix that a peer has cached, as engines, clients and the router's books see it."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from tests.loopback import own_host
from tests.router.prefix_index.publisher import Publisher

from kvasir_router.config import KvEventPorts

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
SIZE = 16
NUM_TOKENS = 2000
NUM_CACHED = 1600
TOKENS = [number % 251 for number in range(NUM_TOKENS)]
BODY = {"model": "tiny", "prompt": TOKENS, "max_tokens": 5}


@pytest.fixture
def start(engines_apart: list[Any], publishers: list[Publisher], start_router: Any, until: Any) -> Any:
    """start(*others, ports, num_cached, **flags): a router that knows what each engine says of itself."""

    async def started(
        *others: Any, ports: tuple[int | None, int | None] = (5600, 5601), num_cached: int = NUM_CACHED, **flags: Any
    ) -> Any:
        events = KvEventPorts(publishers[0].event_port, publishers[0].replay_port)
        router = await start_router(*engines_apart, *others, **{"kv_events": events, "policy": "roundRobin"} | flags)
        service = service_of(router)
        await until(lambda: all(service.following.describe(engine.url)["is_complete"] for engine in engines_apart))
        publishers[0].publish(stored(num_cached))
        for publisher, port in zip(publishers, ports, strict=True):
            publisher.send(b"kvasir-load", 0, idle_with(port))
        await until(lambda: service.index.num_blocks(engines_apart[0].url) == num_cached // SIZE)
        await until(lambda: all(service.following.describe(engine.url)["num_load_reports"] for engine in engines_apart))
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
    engines_apart: list[Any], start: Any, client: Any
) -> None:
    holder, other = engines_apart
    router = await start()
    for _ in engines_apart:
        assert await ask(client, router) == 200
    assert holder.requests == [BODY]
    told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": own_host(1), "remote_port": 5600}
    assert other.requests == [BODY | {"kv_transfer_params": told}]
    assert await count(client, router, "kvasir_router_prefix_fetches_total") == 1
    assert await count(client, router, "kvasir_router_prefix_fetch_tokens_total") == NUM_CACHED


async def test_a_prefill_engine_that_lacks_it_is_told_as_well(
    engines_apart: list[Any], start: Any, client: Any, exit_stack: Any, until: Any
) -> None:
    holder, other = engines_apart
    decode = type(holder)("decode")
    decode.host = own_host(3)
    await decode.start()
    exit_stack.push_async_callback(decode.stop)
    prefills = tuple(engine.url for engine in engines_apart)
    roles = {"endpoint": (), "prefill_endpoint": prefills, "decode_endpoint": (decode.url,)}
    router = await start(decode, **roles, remote_prefill_min_tokens=0)
    service = service_of(router)
    transfers = service.fetching.transfers
    before = transfers.estimate_seconds(holder.url, other.url, NUM_CACHED)
    for engine in engines_apart:
        decode.gate.clear()
        asked = asyncio.create_task(ask(client, router))
        await until(lambda one=engine: one.requests and not service.ledger.has_in_flight(one.url))
        decode.gate.set()
        assert await asked == 200
    [alone], [told] = ([request["kv_transfer_params"] for request in engine.requests] for engine in engines_apart)
    assert alone == {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": alone["transfer_id"]}
    place = {"remote_host": own_host(1), "remote_port": 5600}
    assert told == alone | {"do_remote_prefill": True, "transfer_id": told["transfer_id"]} | place
    assert [request["kv_transfer_params"]["remote_host"] for request in decode.requests] == [own_host(1), own_host(2)]
    assert await count(client, router, "kvasir_router_prefix_fetches_total") == 1
    assert transfers.estimate_seconds(holder.url, other.url, NUM_CACHED) != before


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
    engines_apart: list[Any], start: Any, client: Any, why: str, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    router = await start(**options)
    for _ in engines_apart:
        assert await ask(client, router, **fields) == 200
    assert [engine.requests for engine in engines_apart] == [[BODY | fields], [BODY | fields]], why


async def test_the_cheapest_placement_may_be_one_that_fetches(
    engines_apart: list[Any], start: Any, client: Any
) -> None:
    holder, other = engines_apart
    router = await start(policy="finishTime")
    service = service_of(router)
    assert await ask(client, router) == 200
    load = service.registry.get(holder.url).load
    load.prefill_done_at = load.prefill_rest_seconds = 1e9
    assert await ask(client, router, stream=True) == 200
    assert [len(engine.requests) for engine in engines_apart] == [1, 1]
    assert other.requests[0]["kv_transfer_params"]["remote_port"] == 5600


async def test_where_the_first_attempt_fails_the_holder_computes_no_more_than_ever(
    engines_apart: list[Any], start: Any, client: Any
) -> None:
    holder, other = engines_apart
    router = await start()
    other.die_before_headers = True
    for _ in engines_apart:
        assert await ask(client, router) == 200
    assert [request.get("kv_transfer_params") for request in holder.requests] == [None, None]
    assert len(other.requests) == 1


async def test_a_stream_whose_engine_died_does_not_ask_that_engine(
    engines_apart: list[Any], start: Any, client: Any
) -> None:
    holder, other = engines_apart
    router = await start(policy="finishTime")
    holder.keeps_journal = other.keeps_journal = True
    holder.die_after_tokens = 2
    assert await ask(client, router, stream=True) == 200
    assert [len(engine.requests) for engine in engines_apart] == [1, 1]
    assert "kv_transfer_params" not in other.requests[0]


@pytest.mark.parametrize("is_late", [False, True])
async def test_first_tokens_teach_what_a_pairs_transfers_take(
    engines_apart: list[Any], start: Any, client: Any, is_late: bool
) -> None:
    router = await start()
    fetching = service_of(router).fetching
    holder, other = engines_apart
    before = fetching.transfers.estimate_seconds(holder.url, other.url, NUM_CACHED)
    for _ in engines_apart:
        await ask(client, router, stream=is_late)
    after = fetching.transfers.estimate_seconds(holder.url, other.url, NUM_CACHED)
    assert (after != before) == is_late, "of an answer in one piece the first byte tells nothing"


@pytest.mark.parametrize("options", [{}, {"ports": (None, None)}, {"kv_transfer_port": 0}])
async def test_a_client_may_not_say_whom_to_ask_whatever_is_known_of_the_engines(
    engines_apart: list[Any], start: Any, client: Any, options: dict[str, Any]
) -> None:
    router = await start(**options)
    own = {"remote_host": "10.0.0.7", "remote_port": 5600}
    async with client.post(router.url + URL, json=BODY | {"kv_transfer_params": own}) as response:
        assert response.status == 400
        assert json.loads(await response.read())["error"]["param"] == "kv_transfer_params"
    assert await ask(client, router, kv_transfer_params=None) == 200
    [request] = [request for engine in engines_apart for request in engine.requests]
    assert request.get("kv_transfer_params", "none") is not None, "null says nothing"
