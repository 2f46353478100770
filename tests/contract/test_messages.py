"""Anthropic's client before a real router before two API servers: a stream that its engine leaves goes on in the other,
and the key is checked once.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from tests.runtime.server.conftest import Running, model_folder, running_server

from kvasir_router.config import RouterConfig
from kvasir_router.relay.kv_transfer import prefill_body
from kvasir_router.server import RunningRouter, running
from kvasir_router.tuning import Tuning

__all__ = ["model_folder"]  # a fixture
pytestmark = pytest.mark.anyio
MESSAGES: list[Any] = [{"role": "user", "content": "größer 日本語 😀 the quick brown fox " * 4}]
BODY = {"model": "tiny", "messages": MESSAGES, "max_tokens": 120, "stream": True, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def servers(model_folder: Path, tmp_path: Path) -> Iterator[list[Running]]:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with running_server(model_folder, folders[0]) as one, running_server(model_folder, folders[1]) as two:
        for server in (one, two):
            server.core.step_seconds = 0.01
        yield [one, two]


@pytest.fixture
async def router(servers: list[Running], tmp_path: Path) -> AsyncIterator[RunningRouter]:
    keys = tmp_path / "keys.json"
    keys.write_text('{"secret": "blue"}')
    config = RouterConfig(
        port=0,
        admin_port=0,
        endpoint=tuple(server.url for server in servers),
        probe_interval=0.05,
        shutdown_delay=0.01,
        api_keys_file=keys,
    )
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running(config, None, None, Tuning()))
        async with anthropic.AsyncAnthropic(base_url=router.url, api_key="secret", max_retries=9) as client:
            await client.messages.create(model="tiny", messages=MESSAGES, max_tokens=1)  # both may be ready or one
        yield router


async def test_a_stream_goes_on_in_another_engine_event_for_event(
    router: RunningRouter, servers: list[Running]
) -> None:
    whole = await stream(router, [])
    left = await stream(router, servers)
    assert added_up(left) == added_up(whole)
    assert [event["type"] for event in whole].count("message_start") == 1
    assert sum(server.thread.is_alive() for server in servers) == 1


async def stream(router: RunningRouter, servers: list[Running]) -> list[dict[str, Any]]:
    """Of the servers the one that answers dies in the middle."""
    headers = {"x-api-key": "secret", "x-request-id": "same"}
    received = b""
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{router.url}/v1/messages", json=BODY, headers=headers) as response,
    ):
        assert response.status == 200
        async for chunk in response.content.iter_any():
            received += chunk
            if servers and received.count(b"content_block_delta") > 20:
                next(server for server in servers if is_answering(server)).core.die()
                servers = []
    assert b"\r" not in received
    blocks = [block.split(b"\ndata: ") for block in received.split(b"\n\n")[:-1]]
    return [json.loads(data) for _, data in blocks]


def is_answering(server: Running) -> bool:
    return server.server.admission.num_in_flight > 0


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    return {"text": "".join(texts), "others": [event for event in events if event["type"] != "content_block_delta"]}


def test_what_the_router_writes_for_a_prefill_makes_one_token(servers: list[Running]) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 50, "stream": True}
    answer = servers[0].http.post("/v1/messages", content=prefill_body(json.dumps(asked).encode(), b"null")).json()
    assert answer["usage"]["output_tokens"] == 1


async def test_a_wrong_key_is_told_as_anthropics_client_expects(router: RunningRouter) -> None:
    async with anthropic.AsyncAnthropic(base_url=router.url, api_key="other", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="tiny", messages=MESSAGES, max_tokens=1)
