"""Bodies of requests: what is held of them, how long, and all of them together."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from kvasir_router.errors import BodyBudgetExceededError, BodyTooLargeError, RequestError
from kvasir_router.relay.body import Body, BodyBudget
from kvasir_router.relay.journal import JournalBounds

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


def sent(body: Body, *chunks: bytes, is_whole: bool = True) -> Body:
    for chunk in chunks:
        body.feed(chunk)
    if is_whole:
        body.end()
    return body


async def test_the_budget_is_for_all_bodies_together_until_they_are_dropped() -> None:
    budget = BodyBudget(10)
    one = sent(Body(budget, max_bytes=10), b"abc", b"defg")
    await one.read()
    assert (one.content, budget.num_bytes) == (b"abcdefg", 7)
    with pytest.raises(BodyBudgetExceededError, match="holds 7 bytes of requests already, of at most 10"):
        await sent(Body(budget, max_bytes=10), b"abcd").read()
    one.drop()
    one.drop()
    assert (one.content, budget.num_bytes) == (b"", 0)
    await sent(Body(budget, max_bytes=10), b"x" * 10).read()
    assert budget.num_bytes == 10


async def test_a_part_of_a_body_counts_until_it_is_dropped() -> None:
    budget = BodyBudget(100)
    body = sent(Body(budget, max_bytes=10), b"abcd", b"e" * 7, b"f")
    with pytest.raises(BodyTooLargeError):
        await body.read()
    assert budget.num_bytes == 4
    body.drop()
    assert budget.num_bytes == 0


async def test_what_comes_of_a_body_that_was_dropped_is_not_held() -> None:
    budget = BodyBudget(100)
    body = sent(Body(budget, max_bytes=10), b"abcd", is_whole=False)
    body.drop()
    sent(body, b"efgh")
    assert (budget.num_bytes, body.content) == (0, b"")


async def test_a_body_of_the_greatest_size_is_taken_and_one_that_announces_more_not_even_begun() -> None:
    budget = BodyBudget(100)
    await sent(Body(budget, max_bytes=10, announced_bytes=10), b"abcd", b"efghij").read()
    with pytest.raises(BodyTooLargeError):
        await sent(Body(budget, max_bytes=10, announced_bytes=11), b"a", is_whole=False).read()
    assert budget.num_bytes == 10


async def test_what_is_refused_is_refused_while_it_is_waited_for(until: Any) -> None:
    body = Body(BodyBudget(100), max_bytes=10)
    reading = asyncio.create_task(body.read())
    await asyncio.sleep(0)
    sent(body, b"x" * 11, is_whole=False)
    with pytest.raises(RequestError):
        await reading


def chat(num_bytes: int, **fields: Any) -> bytes:
    rest = {"model": "tiny", "messages": [{"role": "user", "content": ""}], **fields}
    filling = "x" * (num_bytes - len(json.dumps(rest)))
    return json.dumps(rest | {"messages": [{"role": "user", "content": filling}]}).encode()


def held(router: Any) -> int:
    lines = router.metrics.render().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith("kvasir_router_held_body_bytes ")).split()[1]))


LIMITS = {"max_body_size": 10_000, "max_held_body_size": 15_000}


async def test_bodies_of_waiting_requests_count(
    engine: Any, start_router: Any, client: aiohttp.ClientSession, until: Any
) -> None:
    engine.is_ready = False
    router = await start_router(engine, model="tiny", **LIMITS)
    waiting = asyncio.create_task(client.post(router.url + CHAT, data=chat(10_000)))
    await until(lambda: router.services.num_waiting == 1)
    assert held(router) == 10_000
    async with client.post(router.url + CHAT, data=chat(6_000)) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert (await response.json())["error"]["code"] == "body_budget_exceeded"
    engine.is_ready = True
    async with await waiting as response:
        assert response.status == 200
    await until(lambda: held(router) == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_body_is_dropped_once_its_answer_has_begun_and_cannot_be_continued(
    stream: bool, engine: Any, start_router: Any, client: aiohttp.ClientSession
) -> None:
    router = await start_router(engine, **LIMITS)
    engine.num_tokens = 10**9 if stream else 10**6
    async with client.post(router.url + CHAT, data=chat(10_000, stream=stream)) as response:
        await response.content.readany()
        assert held(router) == 0
        assert router.services.describe()[0]["num_in_flight"] == 1


async def test_a_body_is_held_as_long_as_its_stream_may_have_to_go_on_elsewhere(
    engine: Any, start_router: Any, client: aiohttp.ClientSession, until: Any
) -> None:
    engine.keeps_journal, engine.num_tokens = True, 10**9
    engine.later_gate.clear()
    router = await start_router(engine, tuned={"journal": JournalBounds(max_bytes=10)}, **LIMITS)
    async with client.post(router.url + CHAT, data=chat(10_000, stream=True)) as response:
        await response.content.readany()
        assert held(router) == 10_000 + len(b"[0]\n")
        engine.later_gate.set()
        await until(lambda: held(router) == 0)


async def test_a_body_of_the_greatest_size_is_continued_with_its_journal(
    engines: Any, start_router: Any, client: aiohttp.ClientSession
) -> None:
    for engine in engines:
        engine.keeps_journal, engine.num_tokens = True, 8
    first, second = sorted(engines, key=lambda engine: engine.url)
    first.die_after_tokens = 4
    router = await start_router(*engines, **LIMITS)
    async with client.post(router.url + CHAT, data=chat(10_000, stream=True)) as response:
        assert await response.read() == first.stream_bytes(8) + b"data: [DONE]\n\n"
    assert (first.bodies, second.bodies) == ([chat(10_000, stream=True)],) * 2
    assert second.journals[0] != b""


async def test_whatever_becomes_of_a_request_its_body_is_dropped(
    engine: Any, start_router: Any, client: aiohttp.ClientSession, until: Any
) -> None:
    router = await start_router(engine, retries=0, max_queue_wait=0.05, **LIMITS)
    for trouble in ({"status": 400}, {"die_before_headers": True}, {"is_ready": False}):
        for name, value in trouble.items():
            setattr(engine, name, value)
        async with client.post(router.url + CHAT, data=chat(9_000)) as response:
            assert response.status >= 400
        await until(lambda: held(router) == 0)
    async with client.post(router.url + CHAT, data=b"{" * 5_000) as response:
        assert response.status == 400
    await until(lambda: held(router) == 0)
