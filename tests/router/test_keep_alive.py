"""Streams that bring nothing for a while: a comment says that they live, and changes nothing of what comes."""

import asyncio
from typing import Any

import aiohttp
import openai
import pytest

from kvasir_router.service.registry import EndpointState

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
COMMENT = b": keep-alive\n"
SOON = {"sse_keepalive_interval": 0.08}


async def begun(client: aiohttp.ClientSession, url: str, body: Any = BODY) -> aiohttp.ClientResponse:
    """Returns once the head is there."""
    return await asyncio.wait_for(client.post(url, json=body), 10)


async def two_comments(stream: aiohttp.ClientResponse) -> bytes:
    return await asyncio.wait_for(stream.content.readexactly(2 * len(COMMENT)), 10)


async def test_a_stream_that_waits_for_an_engine_gets_its_head_and_comments(
    engine: Any, start_router: Any, client: Any
) -> None:
    engine.is_ready = False
    router = await start_router(engine, model="tiny", **SOON)
    async with await begun(client, router.url + CHAT) as stream:
        assert (stream.status, stream.content_type) == (200, "text/event-stream")
        assert stream.headers["x-accel-buffering"] == "no"
        assert await two_comments(stream) == 2 * COMMENT
        engine.is_ready = True
        rest = await stream.content.read()
    assert rest.replace(COMMENT, b"") == engine.stream_bytes(5) + b"data: [DONE]\n\n"


async def test_between_two_tokens_too(engine: Any, start_router: Any, client: Any) -> None:
    engine.later_gate.clear()
    router = await start_router(engine, **SOON)
    async with await begun(client, router.url + CHAT) as stream:
        first = engine.stream_bytes(1)
        assert await stream.content.readexactly(len(first)) == first
        assert await two_comments(stream) == 2 * COMMENT
        engine.later_gate.set()
        rest = await stream.content.read()
    assert first + rest.replace(COMMENT, b"") == engine.stream_bytes(5) + b"data: [DONE]\n\n"


async def test_a_lost_stream_is_continued_behind_comments(
    engines: Any, start_router: Any, client: Any, until: Any
) -> None:
    for one in engines:
        one.keeps_journal = True
    engines[0].die_after_tokens, engines[1].is_ready = 2, False
    engines[0].gate.clear()
    engines[0].later_gate.clear()
    router = await start_router(*engines, **SOON)
    async with await begun(client, router.url + CHAT) as stream:
        text = await two_comments(stream)
        engines[1].is_ready = True
        await until(lambda: router.services.num_in_state(EndpointState.READY) == 2)
        engines[0].gate.set()
        text += await asyncio.wait_for(stream.content.readuntil(b"data: "), 10)
        engines[0].later_gate.set()
        text += await stream.content.read()
    assert text.replace(COMMENT, b"") == engines[0].stream_bytes(5) + b"data: [DONE]\n\n"


async def test_a_refusal_after_the_head_is_the_last_event(engine: Any, start_router: Any, client: Any) -> None:
    engine.gate.clear()
    router = await start_router(engine, retries=0, **SOON)
    async with await begun(client, router.url + CHAT) as stream:
        await two_comments(stream)
        await engine.stop()
        *comments, event = (await stream.content.read()).split(b"data: ")
    assert set(b"".join(comments).splitlines()) <= {COMMENT.strip()}
    assert b'"code":"endpoint_unreachable"' in event
    assert event.endswith(b"\n\n")


async def test_an_engines_own_error_after_the_head_is_the_last_event(
    engine: Any, start_router: Any, client: Any
) -> None:
    engine.is_ready, engine.status = False, 422
    router = await start_router(engine, model="tiny", **SOON)
    async with await begun(client, router.url + CHAT) as stream:
        await two_comments(stream)
        engine.is_ready = True
        text = await stream.content.read()
    assert text.replace(COMMENT, b"") == b'data: {"error": {"message": "one", "code": 422}}\n\n'
    async with client.get(router.admin_url + "/metrics") as metrics:
        assert 'kvasir_router_requests_total{code="422",model="tiny"} 1.0' in await metrics.text()


async def test_openais_client_reads_a_stream_with_comments(engine: Any, start_router: Any) -> None:
    engine.gate.clear()
    router = await start_router(engine, **SOON)
    asyncio.get_running_loop().call_later(0.4, engine.gate.set)
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="k") as sdk:
        stream = await sdk.chat.completions.create(**BODY)  # type: ignore[call-overload]
        text = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(text) == "0 1 2 3 4 "


@pytest.mark.parametrize(
    ("body", "interval"), [(BODY | {"stream": False}, 0.08), (BODY, 0.0)], ids=["whole answer", "switched off"]
)
async def test_others_wait_in_silence(engine: Any, start_router: Any, client: Any, body: Any, interval: float) -> None:
    engine.is_ready = False
    router = await start_router(engine, model="tiny", max_queue_wait=0.5, sse_keepalive_interval=interval)
    async with client.post(router.url + CHAT, json=body) as response:
        assert response.status == 503


async def test_no_comment_comes_within_an_event(engine: Any, start_router: Any, client: Any) -> None:
    engine.hangs_within_event = True
    router = await start_router(engine, **SOON)
    async with await begun(client, router.url + CHAT) as stream:
        assert await stream.content.readexactly(5) == b"data:"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.content.readany(), 0.3)
