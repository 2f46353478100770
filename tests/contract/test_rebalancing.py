"""Two real engines behind real routers: streams of the overfull one go on in the idle one from the same KV, each once,
also where no failure may be repeated; and where the idle one dies meanwhile, they go on where they were.

The engines are shared; who kills one comes last.
"""

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from tests.contract.engines import Engine, num_failed, num_received, total
from tests.loopback import own_host
from tests.runtime.cli.conftest import a_free_port, save_tiny_llama

from kvasir_router.config import HostPort, KvEventPorts, RouterConfig
from kvasir_router.endpoints.address import Address
from kvasir_router.placement.rebalancing import MoveCriteria
from kvasir_router.server import RunningRouter, running
from kvasir_router.service.peer_settings import PeerSettings
from kvasir_router.service.rebalancing import Outcome, RebalancingSettings
from kvasir_router.tuning import Tuning

pytestmark = pytest.mark.anyio
NUM_STREAMS = 8
NUM_BLOCKS = 128
NUM_TOKENS = 800
BODY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
# On fast machines so short streams would not be worth a move, nor an engine overfull for long; none moves twice.
REBALANCING = RebalancingSettings(criteria=MoveCriteria(saturated_seconds=0.0, gain=0.0, rest_seconds=3600.0))
HELD = ("kvasir_kv_transfer_leased_blocks", "kvasir_kv_cache_usage_ratio", "kvasir_num_requests_running")
MAX_ROUNDS = 10


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def ports() -> KvEventPorts:
    return KvEventPorts(a_free_port(), a_free_port())


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, ports: KvEventPorts) -> Iterator[list[Engine]]:
    model = save_tiny_llama(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=NUM_BLOCKS * 16)
    servers = [Engine(model, number, ports, "--num-gpu-blocks-override", str(NUM_BLOCKS)) for number in (5, 6)]
    try:
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()


class Fleet:
    """Routers that let no failure be repeated, whose second engine comes when the first is overfull."""

    def __init__(self, routers: list[RunningRouter], engines: list[Engine], client: aiohttp.ClientSession) -> None:
        self.full, self.idle = engines
        self.routers = routers
        self.services: list[Any] = [router.services.of(None) for router in routers]
        self._client = client

    async def knows(self, *engines: Engine) -> None:
        """And that they exchange KV, of which idle ones remind every 10 s: the last is given something to do."""
        for router in self.routers:
            router.services.publish({Address(engine.url) for engine in engines})  # type: ignore[attr-defined]
        for service in self.services:
            await until(lambda service=service: len(service.registry.serving(None)) == len(engines))  # type: ignore[misc]
            while not service.registry.get(engines[-1].url).load.kv_transfer_port:
                await self.stream(engines[-1].url, -1, max_tokens=1)

    async def overfill(self, first: int = 0) -> "list[asyncio.Task[list[int]]]":
        """Streams by turns of each router."""
        await self.knows(self.full)
        urls = [self.routers[number % len(self.routers)].url for number in range(NUM_STREAMS)]
        streams = [asyncio.create_task(self.stream(url, first + number)) for number, url in enumerate(urls)]
        load = self.services[0].registry.get(self.full.url).load
        await until(lambda: load.told is not None and load.told.num_waiting > 0)
        os.kill(self.full.engine_core(), signal.SIGSTOP)  # so that they do not end before the other is known
        await self.knows(self.full, self.idle)
        return streams

    def go_on(self) -> None:
        os.kill(self.full.engine_core(), signal.SIGCONT)

    async def stream(self, url: str, number: int, max_tokens: int = NUM_TOKENS) -> list[int]:
        """Its tokens; it must end well."""
        prompt = [(number * 31 + place * 7) % 256 for place in range(64)]
        body = BODY | {"prompt": prompt, "max_tokens": max_tokens}
        tokens: list[int] = []
        named = {"x-request-id": f"stream {number}"}  # whose arrival is news that an engine tells at once
        async with self._client.post(f"{url}/v1/completions", json=body, headers=named) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return tokens
                if data:
                    assert b'"error"' not in data, data
                    tokens += json.loads(data)["choices"][0]["token_ids"]
        raise AssertionError("the stream ended in the middle")

    async def undisturbed(self, engine: Engine, num_streams: int = NUM_STREAMS) -> list[list[int]]:
        """What an engine draws by itself, of as few streams at a time as have room."""
        drawn: list[list[int]] = []
        for first in range(0, num_streams, 2):
            drawn += await asyncio.gather(*(self.stream(engine.url, first + one) for one in range(2)))
        return drawn

    def num(self, outcome: Outcome) -> list[int]:
        """Of each router."""
        return [service.rebalancing.num_by_outcome[outcome] for service in self.services]

    def is_at_rest(self) -> bool:
        """Nothing is kept anywhere."""
        in_flight = [each["num_in_flight"] for service in self.services for each in service.describe()]
        held = [total(engine, name) for engine in (self.full, self.idle) for name in HELD]
        return not any(in_flight) and not any(held)


@pytest.fixture
def hosts() -> list[str]:
    """Of the routers."""
    return ["127.0.0.1"]


@pytest.fixture
async def fleet(engines: list[Engine], ports: KvEventPorts, hosts: list[str]) -> AsyncIterator[Fleet]:
    peers = HostPort("routers", a_free_port())

    async def resolve(where: HostPort) -> set[str]:
        return {f"tcp://{host}:{where.port}" for host in hosts}

    tuning = Tuning(rebalancing=REBALANCING, peers=PeerSettings(resolve=resolve))
    async with AsyncExitStack() as stack:
        routers = []
        for host in hosts:
            config = RouterConfig(
                host=host, port=0, admin_port=0, endpoint=(engines[0].url,), kv_events=ports, rebalancing="on",
                retries=0, probe_interval=0.2, shutdown_timeout=1.0, peers=peers if len(hosts) > 1 else None,
            )  # fmt: skip
            routers.append(await stack.enter_async_context(running(config, tuning=tuning)))
        timeout = aiohttp.ClientTimeout(total=120)
        yield Fleet(routers, engines, await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout)))


async def until(is_true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_streams_of_an_overfull_engine_go_on_in_an_idle_one(fleet: Fleet) -> None:
    streams = await fleet.overfill()
    fleet.go_on()
    drawn = await asyncio.gather(*streams)
    assert fleet.num(Outcome.MOVED)[0] >= 1
    for engine in (fleet.full, fleet.idle):
        assert num_failed(engine) == 0
    assert drawn == await fleet.undisturbed(fleet.idle)
    assert fleet.services[0].in_flight_limits.num_ejected == 0


@pytest.mark.parametrize("hosts", [[own_host(7), own_host(8)]], ids=["hosts"])
async def test_two_routers_move_each_stream_once_and_strand_nothing(
    fleet: Fleet, hosts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    await until(lambda: all(b"kvasir_router_peers 1.0" in router.metrics.render() for router in fleet.routers))
    num_received_before, drawn = num_received(fleet.idle), list[list[int]]()
    with caplog.at_level(logging.INFO, logger="kvasir_router.app"):
        for _ in range(MAX_ROUNDS):
            streams = await fleet.overfill(len(drawn))
            fleet.go_on()
            drawn += await asyncio.gather(*streams)
            if all(fleet.num(Outcome.MOVED)):
                break
        else:
            raise AssertionError("a router has moved nothing")
    goes_on = re.compile(r"request_id=(.+) endpoint=\S+ goes on with a stream lost elsewhere")
    resumed = [found[1] for record in caplog.records if (found := goes_on.match(record.getMessage()))]
    assert len(resumed) >= sum(fleet.num(Outcome.MOVED))
    assert len(resumed) == len(set(resumed)), "a stream has moved twice"
    assert num_received(fleet.idle) > num_received_before
    await until(fleet.is_at_rest)
    assert drawn == await fleet.undisturbed(fleet.idle, len(drawn))


async def test_a_stream_whose_receiver_dies_goes_on_where_it_was(fleet: Fleet) -> None:
    streams = await fleet.overfill()
    fleet.idle.signal(signal.SIGSTOP)  # so that it is asked, and does not answer
    fleet.go_on()
    await until(lambda: fleet.services[0].ledger.tickets(fleet.idle.url))
    fleet.idle.signal(signal.SIGKILL)
    drawn = await asyncio.gather(*streams)
    assert fleet.num(Outcome.MOVED) == [0]
    assert fleet.num(Outcome.ELSEWHERE)[0] >= 1  # another may be sent there before a probe finds that nobody is
    assert num_failed(fleet.full) == 0
    assert drawn == await fleet.undisturbed(fleet.full)
