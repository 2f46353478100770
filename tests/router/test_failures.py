"""What the client sees when engines are away, refuse, die, or when it leaves itself."""

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


def chat(*, stream: bool = False) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": stream}


async def ask(client: aiohttp.ClientSession, router: Any, *, stream: bool = False) -> tuple[int, bytes, str]:
    """Status, body, and the engine that answered."""
    async with client.post(router.url + CHAT, json=chat(stream=stream)) as response:
        return response.status, await response.read(), response.headers.get("x-engine", "")


def code_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "trouble",
    [
        {"status": 503},
        {"status": 502},
        *({"status": each} for each in (401, 403, 404, 405, 429)),
        {"die_before_headers": True},
        {"die_before_first_token": True},
    ],
)
async def test_another_endpoint_answers_when_one_fails_before_the_first_byte(
    trouble: dict[str, Any], stream: bool, engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, policy="roundRobin")
    for name, value in trouble.items():
        setattr(engines[0], name, value)
    if not stream and "die_before_first_token" in trouble:
        engines[0].die_before_headers = True
    answers = [await ask(client, router, stream=stream) for _ in range(2)]
    assert [(status, name) for status, _, name in answers] == [(200, "two"), (200, "two")]
    assert engines[0].requests != []


async def test_an_engine_that_failed_is_not_expected_to_have_cached_the_prompt(
    engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, policy="roundRobin")
    engines[0].die_before_headers = True
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 4000}]}
    for _ in range(2):
        async with client.post(router.url + CHAT, json=body) as response:
            assert (response.status, response.headers["x-engine"]) == (200, "two")
    assert engines[0].requests != []
    blocks = {one["url"]: one["prefix_blocks"] for one in router.services.describe()}
    assert (blocks[engines[0].url], blocks[engines[1].url] > 0) == (0, True)


async def test_another_endpoint_answers_when_one_is_gone(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines, policy="roundRobin", probe_interval=60.0)
    await engines[0].stop()
    for _ in range(3):
        status, _, name = await ask(client, router)
        assert (status, name) == (200, "two")


async def test_a_lone_engines_503_is_relayed(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    engine.status = 503
    status, body, _ = await ask(client, router)
    assert (status, json.loads(body)["error"]["message"]) == (503, "one")
    assert len(engine.requests) == 1


async def test_no_engine_error_is_retried_that_is_the_requests_own_fault(
    engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    for engine in engines:
        engine.status = 400
    assert (await ask(client, router))[0] == 400
    assert sum(len(engine.requests) for engine in engines) == 1


async def test_retries_end(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines, retries=2)
    for engine in engines:
        engine.die_before_headers = True
    status, body, _ = await ask(client, router)
    assert (status, code_of(body)) == (502, "endpoint_unreachable")
    assert sum(len(engine.requests) for engine in engines) == 3


@pytest.mark.parametrize("num_tokens", [1, 3])
async def test_a_stream_cut_short_ends_with_an_error_event_and_is_not_repeated(
    num_tokens: int, engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    for engine in engines:
        engine.die_after_tokens, engine.token_seconds = num_tokens, 0.02
    status, body, _ = await ask(client, router, stream=True)
    assert body.startswith(engines[0].stream_bytes(num_tokens))
    events = body.removeprefix(engines[0].stream_bytes(num_tokens)).split(b"\n\n")
    assert (status, code_of(events[0].removeprefix(b"data: ")), events[1:]) == (200, "stream_interrupted", [b""])
    assert sum(len(engine.requests) for engine in engines) == 1


async def test_requests_wait_for_an_engine_to_become_ready(engine: Any, start_router: Any, client: Any) -> None:
    engine.is_ready = False
    router = await start_router(engine, model="tiny")
    answer = asyncio.create_task(ask(client, router))
    while router.services.num_waiting == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    engine.is_ready = True
    assert (await answer)[0] == 200


async def test_requests_survive_a_restart_of_the_only_engine(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine, probe_interval=60.0)
    await engine.stop()
    answer = asyncio.create_task(ask(client, router))
    while router.services.num_waiting == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await engine.start()
    assert (await answer)[0] == 200


async def test_waiting_too_long_is_503_with_retry_after(engine: Any, start_router: Any, client: Any) -> None:
    engine.is_ready = False
    router = await start_router(engine, max_queue_wait=0.05)
    async with client.post(router.url + CHAT, json=chat()) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "5")
        assert code_of(await response.read()) == "no_ready_endpoint"


async def test_a_full_queue_is_429_with_retry_after(engine: Any, start_router: Any, client: Any) -> None:
    engine.is_ready = False
    router = await start_router(engine, max_queue_size=0)
    async with client.post(router.url + CHAT, json=chat()) as response:
        assert (response.status, response.headers["retry-after"]) == (429, "1")
        assert code_of(await response.read()) == "queue_full"


async def test_more_than_an_engine_may_have_wait_here(engine: Any, start_router: Any, client: Any, until: Any) -> None:
    router = await start_router(engine, max_in_flight=2)
    engine.gate.clear()
    answers = [asyncio.create_task(ask(client, router)) for _ in range(5)]
    await engine.wait_for_requests(2)
    await until(lambda: router.services.num_waiting == 3)
    assert len(engine.requests) == 2
    engine.gate.set()
    assert [status for status, _, _ in await asyncio.gather(*answers)] == [200] * 5


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_the_engines_work(
    stream: bool, engine: Any, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(engine)
    engine.gate.clear()
    answer = asyncio.create_task(ask(client, router, stream=stream))
    await engine.wait_for_requests(1)
    answer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answer
    await asyncio.wait_for(engine.aborted.wait(), 5)
    await until(lambda: router.services.describe()[0]["num_in_flight"] == 0)


async def test_a_client_that_leaves_in_mid_stream_aborts_the_engines_work(
    engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine)
    engine.num_tokens, engine.token_seconds = 100_000, 0.001
    async with client.post(router.url + CHAT, json=chat(stream=True)) as response:
        await response.content.readany()
    await asyncio.wait_for(engine.aborted.wait(), 5)


async def test_a_client_that_leaves_the_queue_never_reaches_an_engine(
    engine: Any, start_router: Any, client: Any, until: Any
) -> None:
    engine.is_ready = False
    router = await start_router(engine, model="tiny")
    answer = asyncio.create_task(ask(client, router))
    await until(lambda: router.services.num_waiting == 1)
    answer.cancel()
    await until(lambda: router.services.num_waiting == 0)
    engine.is_ready = True
    await until(lambda: router.services.of("tiny").registry.can_place("tiny"))
    assert engine.requests == []


async def test_an_answer_that_takes_too_long_is_504(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine, request_timeout=0.05)
    engine.gate.clear()
    status, body, _ = await ask(client, router)
    assert (status, code_of(body)) == (504, "request_timeout")
    await asyncio.wait_for(engine.aborted.wait(), 5)


async def test_an_engine_that_drains_gets_no_new_requests(
    engines: Any, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(*engines)
    engines[0].is_ready = False
    await until(lambda: [one["state"] for one in router.services.describe()].count("ready") == 1)
    assert [(await ask(client, router))[2] for _ in range(3)] == ["two"] * 3
