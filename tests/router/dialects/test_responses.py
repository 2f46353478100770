"""Prompts of OpenAI's Responses API, and which engine keeps what a request goes on from."""

import json
from typing import Any

import pytest

from kvasir_router.dialects.chat import Chat
from kvasir_router.dialects.dialect import Prompt
from kvasir_router.dialects.responses import Responses, mark_in, mark_of
from kvasir_router.errors import StreamInterruptedError

MARK = mark_of(b"10.0.0.1:8000")
ID = f"resp_{MARK}{'0' * 32}"
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}


def prompt(dialect: Chat | Responses, body: dict[str, Any]) -> Prompt:
    found = dialect.prompt(dialect.read(json.dumps(body).encode()), "m")
    assert found is not None
    return found


def holder(body: dict[str, Any]) -> str | None:
    return Responses().read(json.dumps(body).encode()).holder


def test_a_conversation_shares_blocks_with_the_same_one_of_chat() -> None:
    calls = [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "t1", "content": "3"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "reasoning_effort": "low",
    }
    responses = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "t1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t1", "output": "3"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "reasoning": {"effort": "low"},
    }
    ours, theirs = prompt(Responses(), responses), prompt(Chat(), chat)
    assert (ours.content, ours.seed) == (theirs.content, theirs.seed)
    assert ours.messages is not None
    assert theirs.messages is not None
    assert json.loads(bytes(ours.messages)) == json.loads(bytes(theirs.messages))
    assert dict(ours.template_fields).keys() == dict(theirs.template_fields).keys()


@pytest.mark.parametrize("given", [5, [], [{"type": "web_search_call"}]])
def test_what_an_engine_will_refuse_is_matched_by_its_bytes(given: Any) -> None:
    found = prompt(Responses(), {"input": given})
    assert (found.messages, json.loads(found.content)) == (None, given)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"input": "Hi", "previous_response_id": ID}, MARK),
        ({"input": [{"type": "item_reference", "id": f"msg_{ID}_0"}]}, MARK),
        ({"input": "Hi"}, None),
        ({"input": ID}, None),
        ({"input": "Hi", "previous_response_id": None}, None),
        ({"input": "Hi", "previous_response_id": "resp_1"}, None),
        ({"input": "Hi", "previous_response_id": 5}, None),
    ],
)
def test_who_keeps_what_a_request_goes_on_from_stands_in_its_id(body: dict[str, Any], expected: str | None) -> None:
    assert holder(body) == expected


def test_of_a_conversation_that_an_engine_keeps_only_its_end_is_known() -> None:
    assert prompt(Responses(), {"input": "Hi", "previous_response_id": ID}).messages is None


def test_marks_differ_by_host() -> None:
    assert mark_in(ID.encode()) == MARK != mark_of(b"10.0.0.2:8000")


def test_an_error_in_a_stream_is_an_event_of_this_api() -> None:
    kind, data = Responses().error_event(StreamInterruptedError("no")).strip().split(b"\n")
    assert kind == b"event: error"
    told = json.loads(data.removeprefix(b"data: "))
    assert (told["type"], told["message"], told["code"]) == ("error", "no", "stream_interrupted")
