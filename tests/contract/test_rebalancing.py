"""Two real engines behind a real router: a stream of the overfull one goes on in the idle one from the same KV, also
where no failure may be repeated; and where the idle one dies meanwhile, it goes on where it was."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from benchmarks.exchanging_engine import exchanging
from tests.contract.test_migration import total
from tests.runtime.cli.conftest import Server, a_free_port, save_tiny_llama

from kvasir_router.config import KvEventPorts, RouterConfig
from kvasir_router.endpoints.address import Address
from kvasir_router.placement import rebalancing
from kvasir_router.server import RunningRouter, running

pytestmark = pytest.mark.anyio
NUM_STREAMS = 8
NUM_BLOCKS = 128
NUM_TOKENS = 800
BODY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=NUM_BLOCKS * 16)


class Engine(Server):
    """On a host of its own, as a pod is."""

    def __init__(self, model: Path, number: int, ports: KvEventPorts, num_blocks: int = NUM_BLOCKS) -> None:
        self.host = f"127.0.0.{number}"
        super().__init__(
            model, "--dtype", "float32", "--max-num-seqs", str(NUM_STREAMS), "--num-gpu-blocks-override",
            str(num_blocks), *exchanging(self.host, ports.events, ports.replay),
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes that there are."""
        with suppress(FileNotFoundError, ProcessLookupError):
            for pid in (*self.children(), self.process.pid):
                os.kill(pid, number)


@pytest.fixture(scope="module")
def ports() -> KvEventPorts:
    return KvEventPorts(a_free_port(), a_free_port())


@pytest.fixture
def engines(model: Path, ports: KvEventPorts) -> Iterator[list[Engine]]:
    servers = [Engine(model, number, ports) for number in (5, 6)]
    try:
        yield [server.wait_ready() for server in servers]  # type: ignore[misc]
    finally:
        for server in servers:
            server.signal(signal.SIGKILL)
            server.end()


async def drawn_by(client: aiohttp.ClientSession, url: str, number: int, max_tokens: int) -> list[int]:
    """The tokens of a stream that must end well."""
    prompt = [(number * 31 + place * 7) % 256 for place in range(64)]
    body = BODY | {"prompt": prompt, "max_tokens": max_tokens}
    tokens: list[int] = []
    named = {"x-request-id": f"stream {number}"}  # whose arrival is news that an engine tells at once
    async with client.post(f"{url}/v1/completions", json=body, headers=named) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return tokens
            if data:
                assert b'"error"' not in data, data
                tokens += json.loads(data)["choices"][0]["token_ids"]
    raise AssertionError("the stream ended in the middle")


async def undisturbed(
    client: aiohttp.ClientSession, engine: Engine, max_tokens: int, num_streams: int = NUM_STREAMS
) -> list[list[int]]:
    """What an engine draws by itself, of as few streams at a time as have room."""
    drawn: list[list[int]] = []
    for first in range(0, num_streams, 2):
        drawn += await asyncio.gather(*(drawn_by(client, engine.url, first + one, max_tokens) for one in range(2)))
    return drawn


class Fleet:
    """A router that lets no failure be repeated, whose second engine comes when the first is overfull."""

    def __init__(self, router: RunningRouter, engines: list[Engine], client: aiohttp.ClientSession) -> None:
        self.full, self.idle = engines
        self.service: Any = router.services.of(None)
        self._router = router
        self._client = client

    def publish(self, *engines: Engine) -> None:
        self._router.services.publish({Address(engine.url) for engine in engines})  # type: ignore[attr-defined]

    async def knows(self, *engines: Engine) -> None:
        """And that they exchange KV, of which idle ones remind every 10 s: the last is given something to do."""
        self.publish(*engines)
        await until(lambda: len(self.service.registry.serving(None)) == len(engines))
        while not self.service.registry.get(engines[-1].url).load.kv_transfer_port:
            await self.stream(engines[-1].url, NUM_STREAMS, max_tokens=1)

    async def overfill(self) -> list[asyncio.Task[list[int]]]:
        await self.knows(self.full)
        streams = [asyncio.create_task(self.stream(self._router.url, number)) for number in range(NUM_STREAMS)]
        load = self.service.registry.get(self.full.url).load
        await until(lambda: load.told is not None and load.told.num_waiting > 0)
        os.kill(self.full.engine_core(), signal.SIGSTOP)  # so that they do not end before the other is known
        await self.knows(self.full, self.idle)
        return streams

    def go_on(self) -> None:
        os.kill(self.full.engine_core(), signal.SIGCONT)

    async def stream(self, url: str, number: int, max_tokens: int = NUM_TOKENS) -> list[int]:
        return await drawn_by(self._client, url, number, max_tokens)

    async def undisturbed(self, engine: Engine) -> list[list[int]]:
        return await undisturbed(self._client, engine, NUM_TOKENS)

    def outcomes(self) -> dict[str, int]:
        return {outcome.value: number for outcome, number in self.service.rebalancing.num_by_outcome.items()}


@pytest.fixture
async def fleet(engines: list[Engine], ports: KvEventPorts, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rebalancing, "SATURATED_SECONDS", 0.0)
    monkeypatch.setattr(rebalancing, "GAIN", 0.0)  # on fast machines so short streams would not be worth a move
    config = RouterConfig(
        port=0, admin_port=0, endpoint=(engines[0].url,), kv_events=ports, rebalancing="on", retries=0,
        probe_interval=0.2, shutdown_timeout=1.0,
    )  # fmt: skip
    timeout = aiohttp.ClientTimeout(total=120)
    async with running(config) as router, aiohttp.ClientSession(timeout=timeout) as client:
        yield Fleet(router, engines, client)


async def until(is_true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_streams_of_an_overfull_engine_go_on_in_an_idle_one(fleet: Fleet) -> None:
    streams = await fleet.overfill()
    fleet.go_on()
    drawn = await asyncio.gather(*streams)
    assert fleet.outcomes()["moved"] >= 1
    for engine in (fleet.full, fleet.idle):
        assert total(engine, "kvasir_kv_transfer_failures_total") == 0
    assert drawn == await fleet.undisturbed(fleet.idle)
    assert fleet.service.in_flight_limits.num_ejected == 0


async def test_a_stream_whose_receiver_dies_goes_on_where_it_was(fleet: Fleet) -> None:
    streams = await fleet.overfill()
    fleet.idle.signal(signal.SIGSTOP)  # so that it is asked, and does not answer
    fleet.go_on()
    await until(lambda: fleet.service.ledger.tickets(fleet.idle.url))
    fleet.idle.signal(signal.SIGKILL)
    drawn = await asyncio.gather(*streams)
    outcomes = fleet.outcomes()
    assert outcomes["moved"] == 0
    assert outcomes["elsewhere"] >= 1  # another may be sent there before a probe finds that nobody is
    assert total(fleet.full, "kvasir_kv_transfer_failures_total") == 0
    assert drawn == await fleet.undisturbed(fleet.full)
