"""Prompts and errors of Anthropic's API."""

import json
from typing import Any

import pytest

from kvasir_router.dialects.chat import Chat
from kvasir_router.dialects.dialect import Prompt
from kvasir_router.dialects.messages import CountTokens, Messages
from kvasir_router.errors import BadGatewayError, QueueFullError, RequestError, UnknownModelError

HEADER = {"type": "text", "text": "x-anthropic-billing-header: cch=1f2e;"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def prompt(dialect: Chat | Messages, body: dict[str, Any]) -> Prompt:
    found = dialect.prompt(dialect.read(json.dumps(body).encode()), "m")
    assert found is not None
    return found


def test_a_conversation_shares_blocks_with_the_same_one_of_chat() -> None:
    calls = [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Well", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "t1", "content": "3"},
            {"role": "user", "content": "So?"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
        ],
    }
    said = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "Well"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]}
    messages = {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ],
        "tools": [TOOL],
    }
    ours, theirs = prompt(Messages(), messages), prompt(Chat(), chat)
    assert (ours.content, ours.seed) == (theirs.content, theirs.seed)
    assert ours.messages is not None
    assert theirs.messages is not None
    assert json.loads(bytes(ours.messages)) == json.loads(bytes(theirs.messages))


def test_the_header_of_coding_assistants_tells_no_prompts_apart() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    system = [{"type": "text", "text": "Be brief."}]
    with_header = prompt(Messages(), {"system": [HEADER, *system], "messages": messages})
    assert with_header == prompt(Messages(), {"system": system, "messages": messages})


def test_the_answers_beginning_in_the_request_is_continued() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I"}]
    fields = dict(prompt(Messages(), {"messages": messages}).template_fields)
    assert bytes(fields["continue_final_message"]) == b"true"


@pytest.mark.parametrize("messages", [5, [], [{"role": "user", "content": [{"type": "image"}]}]])
def test_what_an_engine_will_refuse_is_matched_by_its_bytes(messages: Any) -> None:
    found = prompt(Messages(), {"messages": messages})
    assert (found.messages, json.loads(found.content)) == (None, messages)


def test_nothing_is_prefilled_to_count_tokens() -> None:
    dialect = CountTokens()
    assert dialect.prompt(dialect.read(b'{"messages": []}'), "m") is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("no"), "api_error"),
        (BadGatewayError("no"), "api_error"),
        (QueueFullError("no"), "rate_limit_error"),
        (UnknownModelError("no"), "not_found_error"),
    ],
)
def test_errors_are_in_the_words_of_this_api(error: RequestError, kind: str) -> None:
    body = Messages().error_body(error)
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert CountTokens().error_event(error) == b"event: error\ndata: " + body + b"\n\n"
