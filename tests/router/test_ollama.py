"""Ollama's API at a router: requests come to engines in chat's words, and answers go out as lines of JSON."""

import json
from typing import Any

import pytest
from aiohttp import web
from tests.router.conftest import FakeEngine

from kvasir_chat.messages import ConversationRefusedError
from kvasir_chat.ollama import chat_request

pytestmark = pytest.mark.anyio
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CALL = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}
EVENTS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"delta": {"reasoning": "Well", "reasoning_content": "Well"}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "Let me "}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "see", "tool_calls": [CALL]}, "finish_reason": None}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ' "Oslo"}'}}]}}]},
    {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}},
]
CALLED = [{"id": "c1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}}]


async def lines(client: Any, router: Any, path: str = "/api/chat", **asked: Any) -> list[dict[str, Any]]:
    async with client.post(router.url + path, json=ASKED | asked) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def whole(client: Any, router: Any, path: str = "/api/chat", **asked: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(router.url + path, json=ASKED | {"stream": False} | asked) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


def says(engine: FakeEngine, *events: Any) -> None:
    """The engine's stream is these events, in pieces that end anywhere."""

    async def speak(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        told = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        for at in range(0, len(told), 37):
            await response.write(told[at : at + 37])
        return response

    engine.speak = speak  # type: ignore[method-assign]


async def test_a_chat_is_streamed_line_by_line(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    told = await lines(client, router)
    assert [each["message"] for each in told[:-1]] == [
        {"role": "assistant", "content": f"{number} "} for number in range(5)
    ]
    assert [each["done"] for each in told] == [False] * 5 + [True]
    assert told[-1]["message"] == {"role": "assistant", "content": ""}
    assert told[-1]["done_reason"] == "stop"
    assert all(each["model"] == "tiny" for each in told)
    [asked] = engine.requests
    assert asked == ASKED | {"stream": True, "stream_options": {"include_usage": True}}
    assert engine.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize("num_tokens", range(1, 5))
async def test_a_chat_goes_on_in_another_engine(num_tokens: int, engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines)
    first, second = sorted(engines, key=lambda engine: engine.url)
    first.keeps_journal = second.keeps_journal = True
    first.die_after_tokens = num_tokens
    told = [each["message"]["content"] for each in await lines(client, router)]
    assert told == ["0 ", "1 ", "2 ", "3 ", "4 ", ""]
    assert len(second.requests) == 1


async def test_a_whole_answer_goes_on_in_another_engine_too(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines)
    for engine in engines:
        engine.keeps_journal = True
    sorted(engines, key=lambda engine: engine.url)[0].die_after_tokens = 3
    status, told = await whole(client, router)
    assert (status, told["message"]["content"]) == (200, "0 1 2 3 4 ")


async def test_thoughts_calls_and_counts_are_ollamas(engine: Any, start_router: Any, client: Any) -> None:
    says(engine, *EVENTS)
    router = await start_router(engine)
    told = await lines(client, router)
    assert [each["message"] for each in told] == [
        {"role": "assistant", "content": "", "thinking": "Well"},
        {"role": "assistant", "content": "Let me "},
        {"role": "assistant", "content": "see"},
        {"role": "assistant", "content": "", "tool_calls": CALLED},
        {"role": "assistant", "content": ""},
    ]
    last = told[-1]
    assert (last["prompt_eval_count"], last["eval_count"], last["done_reason"]) == (7, 9, "stop")
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
    _, one = await whole(client, router)
    assert one["message"] == {
        "role": "assistant", "content": "Let me see", "thinking": "Well", "tool_calls": CALLED,
    }  # fmt: skip
    assert one["eval_count"] == 9


async def test_a_call_that_was_cut_is_told_as_text(engine: Any, start_router: Any, client: Any) -> None:
    says(engine, *EVENTS[:5], {"choices": [{"delta": {}, "finish_reason": "length"}]})
    told = await lines(client, await start_router(engine))
    assert told[-2]["message"] == {"role": "assistant", "content": '{"city":'}
    assert told[-1]["done_reason"] == "length"


async def test_generate_answers_a_prompt(engine: Any, start_router: Any, client: Any) -> None:
    says(engine, *EVENTS[:3])
    router = await start_router(engine)
    asked = {"model": "tiny", "system": "Be kind.", "prompt": "hi", "stream": False}
    async with client.post(router.url + "/api/generate", json=asked) as response:
        told = await response.json()
    assert (told["response"], told["thinking"], told["done"]) == ("Let me ", "Well", True)
    assert engine.requests[0]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize(
    ("path", "asked"), [("/api/chat", {"messages": []}), ("/api/generate", {}), ("/api/generate", {"prompt": ""})]
)
async def test_a_request_that_says_nothing_loads_the_model(
    path: str, asked: Any, engine: Any, start_router: Any, client: Any
) -> None:
    says(engine, *EVENTS[:3])
    router = await start_router(engine)
    for stream in (True, False):
        async with client.post(router.url + path, json={"model": "tiny", "stream": stream} | asked) as response:
            [told] = (await response.text()).splitlines()
        read = json.loads(told)
        said = read["response"] if path.endswith("generate") else read["message"]["content"]
        assert (said, read["done"], read["done_reason"]) == ("", True, "load")
    assert engine.requests[0]["max_tokens"] == 1
    async with client.post(router.url + path, json={"model": "nobody"} | asked) as response:
        assert response.status == 404


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_is_a_text_with_its_status(stream: bool, engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"model": "nobody"}, 404, "not served here"),
        ({"messages": 3}, 400, "messages: a list"),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat"),
    ]
    engine.status = 400
    for asked, status, text in [*wrong, ({}, 400, "one")]:
        async with client.post(router.url + "/api/chat", json=ASKED | {"stream": stream} | asked) as response:
            assert response.status == status
            assert text in (await response.json())["error"]


async def test_an_error_in_the_middle_is_the_last_line(engine: Any, start_router: Any, client: Any) -> None:
    says(engine, EVENTS[2], {"error": {"message": "The engine is tired", "type": "engine_error"}})
    router = await start_router(engine)
    told = await lines(client, router)
    assert told[-1] == {"error": "The engine is tired"}
    assert await whole(client, router) == (500, {"error": "The engine is tired"})


async def test_an_engine_that_dies_without_a_journal_is_the_last_line(
    engine: Any, start_router: Any, client: Any
) -> None:
    engine.die_after_tokens = 2
    told = await lines(client, await start_router(engine))
    assert list(told[-1]) == ["error"]


async def test_a_stream_that_waits_brings_empty_pieces(engine: Any, start_router: Any, client: Any) -> None:
    engine.gate.clear()
    router = await start_router(engine, sse_keepalive_interval=0.05)
    async with client.post(router.url + "/api/chat", json=ASKED) as response:
        first = json.loads(await response.content.readline())
        engine.gate.set()
        rest = [json.loads(line) for line in (await response.text()).splitlines()]
    assert first["message"] == {"role": "assistant", "content": ""}
    assert "".join(each["message"]["content"] for each in rest) == "0 1 2 3 4 "


async def test_models_are_listed_and_shown(engine: Any, start_router: Any, client: Any) -> None:
    engine.max_model_len = 512
    router = await start_router(engine)
    async with client.get(router.url + "/api/tags") as response:
        [tag] = (await response.json())["models"]
    assert (tag["name"], tag["model"]) == ("tiny", "tiny")
    for name in ("tiny", "tiny:latest"):
        async with client.post(router.url + "/api/show", json={"model": name}) as response:
            shown = await response.json()
        assert shown["model_info"]["kvasir.context_length"] == 512
        assert "tools" in shown["capabilities"]
    async with client.post(router.url + "/api/show", json={"model": "nobody"}) as response:
        assert response.status == 404
        assert "not served here" in (await response.json())["error"]
    async with client.post(router.url + "/api/show", data=b" " * 2**17) as response:
        assert response.status == 413
    async with client.get(router.url + "/api/version") as response:
        assert (await response.json())["version"]
    async with client.get(router.url + "/api/pull") as response:
        assert (response.status, list(await response.json())) == (404, ["error"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"options": {"num_predict": 5, "repeat_penalty": 1.1, "num_ctx": 99, "top_k": 3, "mirostat": 0}},
         {"max_tokens": 5, "repetition_penalty": 1.1, "top_k": 3}),
        ({"options": {"num_predict": -1, "seed": 1, "stop": ["a"]}}, {"seed": 1, "stop": ["a"]}),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"format": {"type": "object"}}, {"response_format": {"type": "json_schema", "json_schema": {
            "name": "answer", "schema": {"type": "object"}, "strict": True}}}),
        ({"format": ""}, {}),
        ({"think": True}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        ({"think": False}, {"reasoning_effort": "none"}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"tools": []}, {}),
        ({"keep_alive": "5m", "raw": False}, {}),
    ],
)  # fmt: skip
def test_wishes_are_chats(given: dict[str, Any], told: dict[str, Any]) -> None:
    plain = chat_request(ASKED)
    assert chat_request(ASKED | given) == plain | told


def test_results_of_tools_belong_to_calls() -> None:
    calls = [{"function": {"name": name, "arguments": {"at": 1}}} for name in ("time", "weather", "time")]
    results = [{"role": "tool", "content": "x", **named} for named in ({"tool_name": "weather"}, {}, {})]
    made = chat_request({"model": "m", "messages": [{"role": "assistant", "tool_calls": calls}, *results]})["messages"]
    first, weather, last = (call["id"] for call in made[0]["tool_calls"])
    assert len({first, weather, last}) == 3
    assert [message["tool_call_id"] for message in made[1:]] == [weather, first, last]
    assert made[0]["tool_calls"][0]["function"] == {"name": "time", "arguments": '{"at": 1}'}


def test_images_become_parts() -> None:
    [message] = chat_request({"model": "m", "messages": [{"role": "user", "content": "what?", "images": ["QUJD"]}]})[
        "messages"
    ]
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]
    assert message["content"][1]["image_url"]["url"].endswith(",QUJD")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": [3]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "images": 3}]}, "messages[0].images"),
        ({"options": 3}, "options"),
        ({"suffix": "x"}, "suffix"),
        ({"raw": True}, "raw"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_what_cannot_be_translated_is_named(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConversationRefusedError) as refused:
        chat_request(ASKED | wrong)
    assert refused.value.field == field
