"""OpenAI's client before a real router before two API servers: what one of them keeps is found there, and a stream that
its engine leaves goes on in the other, event for event.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tests.contract.test_messages import is_answering
from tests.runtime.server.conftest import Running, model_folder, running_server
from tests.runtime.server.test_responses_api import added_up, events_of

from kvasir_router.config import RouterConfig
from kvasir_router.dialects.responses import Responses, mark_of
from kvasir_router.relay.kv_transfer import prefill_body
from kvasir_router.server import RunningRouter, running
from kvasir_router.service.registry import EndpointState
from kvasir_runtime.server.open_responses import holder_mark
from kvasir_runtime.server.response_events import END_OF_STREAM

__all__ = ["model_folder"]  # a fixture
pytestmark = pytest.mark.anyio
PROMPT = "größer 日本語 😀 the quick brown fox " * 4


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def servers(model_folder: Path, tmp_path: Path) -> Iterator[list[Running]]:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with running_server(model_folder, folders[0]) as one, running_server(model_folder, folders[1]) as two:
        yield [one, two]


@pytest.fixture
async def router(servers: list[Running]) -> AsyncIterator[RunningRouter]:
    urls = tuple(server.url for server in servers)
    config = RouterConfig(port=0, admin_port=0, endpoint=urls, probe_interval=0.05, shutdown_delay=0.01)
    async with running(config) as router:
        await until(lambda: router.services.num_in_state(EndpointState.READY) == len(servers))
        yield router


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_what_an_engine_keeps_is_found_there(client: openai.AsyncOpenAI, servers: list[Running]) -> None:
    for _ in range(4):
        first = await client.responses.create(input="Hi", max_output_tokens=2)
        second = await client.responses.create(input="Go on", previous_response_id=first.id, max_output_tokens=2)
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text
        listed = await client.responses.input_items.list(second.id, limit=2, order="asc")
        assert [item.type for item in listed.data] == ["message", "message"]
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            await client.responses.retrieve(second.id)
    assert all(server.core.received for server in servers)


async def test_a_stream_in_the_background_is_come_back_to_where_it_is_made(
    client: openai.AsyncOpenAI, servers: list[Running]
) -> None:
    for server in servers:
        server.core.step_seconds = 0.02
    options: dict[str, Any] = {"max_output_tokens": 20, "extra_body": {"ignore_eos": True}}
    async with await client.responses.create(input="Hi", background=True, stream=True, **options) as stream:
        left = [await anext(stream) for _ in range(3)]
    response_id = left[0].response.id
    rest = await client.responses.retrieve(response_id, stream=True, starting_after=left[-1].sequence_number)
    events = [*left, *[event async for event in rest]]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (events[-1].type, events[-1].response.usage.output_tokens) == ("response.incomplete", 20)
    again = await client.responses.retrieve(response_id, stream=True)
    assert [event async for event in again] == events


async def test_the_events_of_a_lost_engine_end_with_an_error(
    router: RunningRouter, client: openai.AsyncOpenAI, servers: list[Running]
) -> None:
    for server in servers:
        server.core.step_seconds = 0.02
    options: dict[str, Any] = {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
    async with await client.responses.create(input="Hi", background=True, stream=True, **options) as stream:
        response_id = (await anext(stream)).response.id
    url = f"{router.url}/v1/responses/{response_id}?stream=true"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        received = await answer.content.readany()
        next(server for server in servers if server.core.received).core.die()
        received += await answer.content.read()
    assert events_of(received)[-1]["type"] in ("response.failed", "error")


async def test_a_tenant_sees_its_own_responses_alone(servers: list[Running], tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"k1": "blue", "k2": "red"}')
    urls = tuple(server.url for server in servers)
    options: dict[str, Any] = {"probe_interval": 0.05, "shutdown_delay": 0.01, "shutdown_timeout": 1.0}
    async with (
        running(RouterConfig(port=0, admin_port=0, endpoint=urls, api_keys_file=keys, **options)) as router,
        openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="k1") as blue,
        openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="k2") as red,
        openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="k3") as nobody,
    ):
        made = await blue.responses.create(input="Hi", max_output_tokens=2)
        assert (await blue.responses.retrieve(made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await red.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError):
            await red.responses.create(input="Go on", previous_response_id=made.id)
        with pytest.raises(openai.AuthenticationError):
            await nobody.responses.retrieve(made.id)


async def test_what_no_engine_keeps_is_said_to_be_kept_by_none(client: openai.AsyncOpenAI) -> None:
    for name in ("resp_1", f"resp_{'0' * 40}"):
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            await client.responses.retrieve(name)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(input="Go on", previous_response_id=name)
        assert refused.value.code == "previous_response_not_found"


async def test_what_a_lost_engine_kept_is_said_to_be_lost(
    client: openai.AsyncOpenAI, servers: list[Running], router: RunningRouter
) -> None:
    first = await client.responses.create(input="Hi", max_output_tokens=2)
    next(server for server in servers if server.core.received).core.die()
    await until(lambda: router.services.num_in_state(EndpointState.READY) == 1)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(input="Go on", previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"


async def test_a_stream_goes_on_in_another_engine_event_for_event(
    router: RunningRouter, servers: list[Running]
) -> None:
    for server in servers:
        server.core.step_seconds = 0.01
    whole = await stream(router, [])
    left = await stream(router, servers)
    assert [event["sequence_number"] for event in left] == list(range(len(left)))
    assert added_up(left) == added_up(whole)


async def stream(router: RunningRouter, servers: list[Running]) -> list[dict[str, Any]]:
    """Of the servers the one that answers dies in the middle."""
    body = {"input": PROMPT, "max_output_tokens": 120, "stream": True, "ignore_eos": True, "temperature": 0}
    received = b""
    async with aiohttp.ClientSession() as client, client.post(f"{router.url}/v1/responses", json=body) as response:
        assert response.status == 200
        async for chunk in response.content.iter_any():
            received += chunk
            if servers and received.count(b"output_text.delta") > 40:
                next(server for server in servers if is_answering(server)).core.die()
                servers = []
    assert b"\r" not in received
    return events_of(received)


def test_engine_and_router_agree_on_marks_and_ends() -> None:
    assert mark_of(b"10.0.0.1:8000") == holder_mark("10.0.0.1:8000")
    assert Responses.end_of_stream == END_OF_STREAM


def test_what_the_router_writes_for_a_prefill_makes_one_token_and_keeps_nothing(servers: list[Running]) -> None:
    body = prefill_body(json.dumps({"input": PROMPT, "max_output_tokens": 50, "stream": True}).encode(), b"null")
    answer = servers[0].http.post("/v1/responses", content=body).json()
    assert answer["usage"]["output_tokens"] == 1
