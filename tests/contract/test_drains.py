"""Two real engines behind a real router: streams of the one that drains go on in the other from the same KV, where no
failure may be repeated."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from tests.contract.engines import Engine, all_ready, num_failed, num_received
from tests.runtime.cli.conftest import a_free_port, save_tiny_llama

from kvasir_router.config import KvEventPorts, RouterConfig
from kvasir_router.endpoints.address import Address
from kvasir_router.server import running

pytestmark = pytest.mark.anyio
NUM_STREAMS, NUM_BLOCKS, NUM_TOKENS = 2, 64, 400
BODY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True, "max_tokens": NUM_TOKENS}


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
    with all_ready(servers):
        yield servers


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def stream(client: aiohttp.ClientSession, url: str, number: int) -> list[int]:
    """Its tokens; it must end well."""
    tokens: list[int] = []
    body = BODY | {"prompt": [(number * 31 + place * 7) % 256 for place in range(64)]}
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return tokens
            if data:
                assert b'"error"' not in data, data
                tokens += json.loads(data)["choices"][0]["token_ids"]
    raise AssertionError("the stream ended in the middle")


async def until(is_true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_streams_of_an_engine_that_drains_go_on_in_another(
    engines: list[Engine], ports: KvEventPorts, client: aiohttp.ClientSession
) -> None:
    leaving, staying = engines
    config = RouterConfig(
        port=0, admin_port=0, endpoint=(leaving.url,), kv_events=ports, retries=0, probe_interval=0.2,
        shutdown_timeout=1.0,
    )  # fmt: skip
    async with running(config) as router:
        service = router.services.of(None)
        streams = [asyncio.create_task(stream(client, router.url, number)) for number in range(NUM_STREAMS)]
        await until(lambda: [ticket.can_move for ticket in service.ledger.tickets(leaving.url)] == [True] * NUM_STREAMS)
        os.kill(leaving.engine_core(), signal.SIGSTOP)  # so that they do not end before the other is known
        router.services.publish({Address(leaving.url), Address(staying.url)})  # type: ignore[attr-defined]
        await until(lambda: len(service.registry.serving(None)) == 2)
        async with client.post(f"{leaving.url}/drain") as answer:
            assert answer.status < 300
        os.kill(leaving.engine_core(), signal.SIGCONT)
        drawn = await asyncio.gather(*streams)
        assert b'streams_resumed_total{reason="moved"} 2.0' in router.metrics.render()
    assert num_received(staying) > 0
    assert num_failed(staying) == 0
    assert drawn == [await stream(client, staying.url, number) for number in range(NUM_STREAMS)]
