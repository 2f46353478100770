"""The judge is judged: a stream that is cut, altered or refused must not pass for whole. The server is a puppet."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from e2e.traffic.client import Completion, JsonAnswer, Stream, client

EXPECTED = {"prompt_token_ids": [7], "token_ids": [1, 2, 3], "text": "a b c", "next_turn": None}


def event(text: str, token_ids: Sequence[int], num_so_far: int, finish_reason: str | None = None) -> str:
    choice = {"text": text, "token_ids": token_ids, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": num_so_far}})


FIRST, SECOND, LAST = event("a", [1], 1), event(" b", [2], 2), event(" c", [3], 3, "length")
USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
DONE = "[DONE]"
ENDINGS = {
    "whole": [FIRST, SECOND, LAST, USAGE, DONE],
    "cut: CutError('the last event is missing') after 2 tokens": [FIRST, SECOND],
    "cut: CutError('\"gone\"') after 1 tokens": [FIRST, json.dumps({"error": "gone"}), DONE],
    "wrong: ended with None after 2 tokens": [FIRST, SECOND, DONE],
    "wrong: tokens from number 1 are [3]": [FIRST, event(" c", [3], 2)],
    "wrong: tokens from number 1 are [1]": [FIRST, FIRST],
    "wrong: usage counts 3 tokens, 2 came": [FIRST, event(" b", [2], 3)],
    "wrong: the text is 'a x c'...": [FIRST, event(" x", [2], 2), LAST, USAGE, DONE],
}


@pytest.mark.parametrize(("ended_as", "events"), ENDINGS.items(), ids=[name[:40] for name in ENDINGS])
def test_a_stream_is_judged_by_its_tokens_and_its_end(ended_as: str, events: list[str]) -> None:
    assert asyncio.run(judge(Completion(EXPECTED), events)) == ended_as


def test_an_error_status_is_a_refusal() -> None:
    assert asyncio.run(judge(Completion(EXPECTED), [], status=503)) == "refused: status 503: "


def chunk(delta: dict[str, Any], answer_id: str = "chat-1") -> str:
    return json.dumps({"id": answer_id, "choices": [{"delta": delta}]})


def argument(text: str) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"arguments": text}}]}


def numbered(number: int, text: str) -> str:
    return json.dumps({"type": "response.output_text.delta", "sequence_number": number, "delta": text})


def partial(text: str) -> str:
    return json.dumps({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}})


COMPLETED = json.dumps({"type": "response.completed", "sequence_number": 2})
STOPPED = json.dumps({"type": "message_stop"})
JSON_ENDINGS = {
    "a text": ("whole", [chunk({"content": "[1,"}), chunk({"content": " 2]"}), DONE]),
    "a call": ("whole", [chunk(argument("[1,")), chunk(argument(" 2]")), DONE]),
    "a response": ("whole", [numbered(0, "[1,"), numbered(1, " 2]"), COMPLETED]),
    "a message": ("whole", [partial("[1,"), partial(" 2]"), STOPPED]),
    "no end": ("cut: CutError('the last event is missing') after 2 tokens", [partial("[1,"), partial(" 2]")]),
    "an error": ("cut: CutError('\"gone\"') after 1 tokens", [partial("[1,"), json.dumps({"error": "gone"})]),
    "another answer": ("wrong: the answer is '[1, 1]'...", [partial("[1,"), partial(" 1]"), STOPPED]),
    "half": ("wrong: the text is no JSON", [chunk({"content": "[1,"}), DONE]),
    "an event twice": ("wrong: event 1 has number 0", [numbered(0, "[1,"), numbered(0, " 2]")]),
    "two ids": (
        "wrong: event 1 is of chat-2, those before it of chat-1",
        [chunk(argument("[1,")), chunk(argument(" 2]"), "chat-2")],
    ),
}


@pytest.mark.parametrize("ending", JSON_ENDINGS)
def test_an_answer_that_is_json_is_judged_by_what_it_says_and_its_order(ending: str) -> None:
    ended_as, events = JSON_ENDINGS[ending]
    stream = JsonAnswer({"path": "completions", "body": {}, "answer": [1, 2]})
    assert asyncio.run(judge(stream, events)).startswith(ended_as)


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


async def judge(stream: Stream, events: list[str], status: int = 200) -> str:
    """How the client says that a stream of these events ended."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await response.write("".join(f"data: {each}\n\n" for each in events).encode())
        return response

    async with serving(answer) as url, aiohttp.ClientSession() as session:
        return await stream.run(session, url, "model")


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
