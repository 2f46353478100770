"""The judge is judged: a stream that is cut, altered or refused must not pass for whole. The server is a puppet."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from e2e.traffic.client import Stream, client

EXPECTED = {"prompt_token_ids": [7], "token_ids": [1, 2, 3], "text": "a b c", "next_turn": None}


def event(text: str, token_ids: Sequence[int], num_so_far: int, finish_reason: str | None = None) -> str:
    choice = {"text": text, "token_ids": token_ids, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": num_so_far}})


FIRST, SECOND, LAST = event("a", [1], 1), event(" b", [2], 2), event(" c", [3], 3, "length")
USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
DONE = "[DONE]"
ENDINGS = {
    "whole": [FIRST, SECOND, LAST, USAGE, DONE],
    "cut: CutError('no [DONE]') after 2 tokens": [FIRST, SECOND],
    "cut: CutError('\"gone\"') after 1 tokens": [FIRST, json.dumps({"error": "gone"}), DONE],
    "wrong: ended with None after 2 tokens": [FIRST, SECOND, DONE],
    "wrong: tokens from number 1 are [3]": [FIRST, event(" c", [3], 2)],
    "wrong: tokens from number 1 are [1]": [FIRST, FIRST],
    "wrong: usage counts 3 tokens, 2 came": [FIRST, event(" b", [2], 3)],
    "wrong: the text is 'a x c'...": [FIRST, event(" x", [2], 2), LAST, USAGE, DONE],
}


@pytest.mark.parametrize(("ended_as", "events"), ENDINGS.items(), ids=[name[:40] for name in ENDINGS])
def test_a_stream_is_judged_by_its_tokens_and_its_end(ended_as: str, events: list[str]) -> None:
    assert asyncio.run(judge(events)) == ended_as


def test_an_error_status_is_a_refusal() -> None:
    assert asyncio.run(judge([], status=503)) == "refused: status 503: "


@pytest.mark.parametrize(("is_salted", "num_salts"), [(False, 0), (True, 2)])
def test_salted_prompts_are_in_no_cache(is_salted: bool, num_salts: int) -> None:
    salts = [body["cache_salt"] for body in asyncio.run(asked(2, is_salted)) if "cache_salt" in body]
    assert len(salts) == len(set(salts)) == num_salts


def test_a_conversation_has_one_salt() -> None:
    second = EXPECTED | {"prompt_token_ids": [7, 1, 2, 3, 9]}
    bodies = asyncio.run(asked(4, is_salted=True, expected=EXPECTED | {"next_turn": second}))
    assert [len(body["prompt"]) for body in bodies] == [1, 5, 1, 5]
    salts = [body["cache_salt"] for body in bodies]
    assert salts[0] == salts[1] != salts[2] == salts[3]


async def asked(num_streams: int, is_salted: bool, expected: dict[str, Any] = EXPECTED) -> list[dict[str, Any]]:
    """What a client asks for, stream by stream."""
    bodies: list[dict[str, Any]] = []
    stop = asyncio.Event()

    async def refuse(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        if len(bodies) == num_streams:
            stop.set()
        return web.Response(status=503)

    async with serving(refuse) as url, aiohttp.ClientSession() as session:
        plan = {"url": url, "model": "model", "streams": [expected], "is_salted": is_salted}
        await client(session, plan, 0, stop)
    return bodies


async def judge(events: list[str], status: int = 200) -> str:
    """How the client says that a stream of these events ended."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await response.write("".join(f"data: {each}\n\n" for each in events).encode())
        return response

    async with serving(answer) as url, aiohttp.ClientSession() as session:
        return await Stream(dict[str, Any](EXPECTED)).run(session, url, "model")


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The URL of the API, every completion of which is answered so."""
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"{site.name}/v1"
    finally:
        await runner.cleanup()
