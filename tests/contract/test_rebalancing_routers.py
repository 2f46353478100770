"""Two routers before the same two engines, all of them processes: both have streams of the overfull engine go on in the
idle one, each stream once; every client gets its whole answer, and no engine keeps anything."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.contract.test_migration import total
from tests.contract.test_rebalancing import NUM_STREAMS, Engine, drawn_by, undisturbed
from tests.runtime.cli.conftest import a_free_port, save_tiny_llama

from kvasir_router.config import KvEventPorts

pytestmark = pytest.mark.anyio
NUM_TOKENS = 1400
NUM_BLOCKS = 192
HELD = ("kvasir_kv_transfer_leased_blocks", "kvasir_kv_cache_usage_ratio", "kvasir_num_requests_running")
HOSTS = ("127.0.0.7", "127.0.0.8")
MAX_ROUNDS = 10
# As where a DNS knows both. Streams are never too short, an engine overfull for too short or a stream's rest over.
PROGRAM = f"""
import sys
from kvasir_router import cli
from kvasir_router.placement import rebalancing
from kvasir_router.service import peer_feed

async def addresses_of(where):
    return {{f"tcp://{{host}}:{{where.port}}" for host in {HOSTS}}}

peer_feed.addresses_of = addresses_of
rebalancing.SATURATED_SECONDS = rebalancing.GAIN = 0.0
rebalancing.REST_SECONDS = 3600.0
sys.exit(cli.main())
"""
_GOES_ON = re.compile(r"request_id=(.+) endpoint=\S+ goes on with a stream lost elsewhere")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Router:
    def __init__(self, host: str, peers_port: int, ports: KvEventPorts, engines: list[Engine], log: Path) -> None:
        port, admin_port = a_free_port(), a_free_port()
        self.url, self.admin_url = f"http://{host}:{port}", f"http://{host}:{admin_port}"
        self._log = log
        flags = {
            "--host": host, "--port": port, "--admin-host": host, "--admin-port": admin_port, "--retries": 0,
            "--peers": f"routers:{peers_port}", "--kv-events": f"{ports.events}:{ports.replay}",
            "--rebalancing": "on", "--probe-interval": "200ms",
        }  # fmt: skip
        named = [str(word) for flag in flags.items() for word in flag]
        endpoints = [word for engine in engines for word in ("--endpoint", engine.url)]
        with log.open("w") as stderr:
            command = [sys.executable, "-c", PROGRAM, "serve", *named, *endpoints]
            self.process = subprocess.Popen(command, stderr=stderr)

    def resumed(self) -> list[str]:
        """Requests whose streams have gone on in the middle, once for each time."""
        return _GOES_ON.findall(self._log.read_text())


class Fleet:
    def __init__(self, routers: list[Router], engines: list[Engine], client: aiohttp.ClientSession) -> None:
        self.routers = routers
        self.full, self.idle = engines
        self.client = client
        self.drawn: list[list[int]] = []

    async def overfill(self) -> None:
        """Streams of both routers, all at the one engine that answers; then the other is there as well."""
        self.idle.signal(signal.SIGSTOP)
        await self._until(self._routers_have_met)
        first = len(self.drawn)
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(self._stream(first + number)) for number in range(NUM_STREAMS)]
            await self._until(self._requests_wait)
            os.kill(self.full.engine_core(), signal.SIGSTOP)  # so that they do not end before the other is known
            self.idle.signal(signal.SIGCONT)
            await self._until(self._routers_know_the_idle)
            os.kill(self.full.engine_core(), signal.SIGCONT)
        self.drawn += [stream.result() for stream in streams]

    async def has_moved_some(self, router: Router) -> bool:
        """To the engine that it meant."""
        text = await self._get(f"{router.admin_url}/metrics")
        (number,) = re.findall(r'rebalanced_streams_total{outcome="moved",.*} (\d+)', text)
        return int(number) > 0

    async def come_to_rest(self) -> None:
        await self._until(self._nothing_is_kept)

    async def _stream(self, number: int) -> list[int]:
        return await drawn_by(self.client, self.routers[number % 2].url, number, NUM_TOKENS)

    async def _routers_have_met(self) -> bool:
        """And know of one engine that answers."""
        try:
            metrics = [await self._get(f"{router.admin_url}/metrics") for router in self.routers]
        except aiohttp.ClientConnectorError:
            return False  # they start
        states = [(one[self.full.url]["state"], one[self.idle.url]["state"]) for one in await self._endpoints()]
        are_ready = all(full == "ready" and idle != "ready" for full, idle in states)
        return are_ready and all("kvasir_router_peers 1.0" in text for text in metrics)

    async def _requests_wait(self) -> bool:
        return await self._value(self.full, "kvasir_num_requests_waiting") > 0

    async def _routers_know_the_idle(self) -> bool:
        """And that it exchanges KV, of which it reminds every 10 s: it is given something to do."""
        await drawn_by(self.client, self.idle.url, -1, 1)
        known = [one[self.idle.url] for one in await self._endpoints()]
        return all(one["state"] == "ready" and one["kv_transfer_port"] for one in known)

    async def _nothing_is_kept(self) -> bool:
        in_flight = [each["num_in_flight"] for one in await self._endpoints() for each in one.values()]
        held = [await self._value(engine, name) for engine in (self.full, self.idle) for name in HELD]
        return not any(in_flight) and not any(held)

    async def _endpoints(self) -> list[dict[str, dict[str, Any]]]:
        """By url, of each router."""
        texts = [await self._get(f"{router.admin_url}/endpoints") for router in self.routers]
        return [{each["url"]: each for each in json.loads(text)} for text in texts]

    async def _value(self, engine: Engine, name: str) -> float:
        text = await self._get(f"{engine.url}/metrics")
        (value,) = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return float(value)

    async def _get(self, url: str) -> str:
        async with self.client.get(url) as answer:
            return await answer.text()

    async def _until(self, is_true: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(120):
            while not await is_true():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[list[Engine], KvEventPorts]]:
    model = save_tiny_llama(tmp_path / "long", max_position_embeddings=2048)
    ports = KvEventPorts(a_free_port(), a_free_port())
    servers = [Engine(model, number, ports, NUM_BLOCKS) for number in (9, 10)]
    try:
        for server in servers:
            server.wait_ready()
        yield servers, ports
    finally:
        for server in servers:
            server.signal(signal.SIGKILL)
            server.end()


@pytest.fixture
async def fleet(engines: tuple[list[Engine], KvEventPorts], tmp_path: Path) -> AsyncIterator[Fleet]:
    servers, ports = engines
    peers_port = a_free_port()
    routers = [Router(host, peers_port, ports, servers, tmp_path / host) for host in HOSTS]
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as client:
            yield Fleet(routers, servers, client)
    finally:
        for router in routers:
            router.process.kill()
            router.process.wait()


async def test_two_routers_move_each_stream_once_and_strand_nothing(fleet: Fleet) -> None:
    for _ in range(MAX_ROUNDS):
        await fleet.overfill()
        if all([await fleet.has_moved_some(router) for router in fleet.routers]):
            break
    else:
        raise AssertionError("a router has moved nothing")
    resumed = [request_id for router in fleet.routers for request_id in router.resumed()]
    assert len(resumed) == len(set(resumed)), "a stream has moved twice"
    assert total(fleet.idle, "kvasir_kv_transfer_blocks_total", direction="received") > 0
    await fleet.come_to_rest()
    assert fleet.drawn == await undisturbed(fleet.client, fleet.idle, NUM_TOKENS, len(fleet.drawn))
