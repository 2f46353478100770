"""OpenAI's /v1/responses: conversations of items, which engines render as those of chat.

A request may go on from a response that one engine keeps. That engine's mark stands in the response's id, and in the
ids of its items, so every router finds it.
"""

import hashlib
import re
from collections.abc import Sequence

import msgspec

from kvasir_chat.open_responses import chat_messages, chat_tool, input_items, offered_tools
from kvasir_router.dialects import openai
from kvasir_router.dialects.chat import Conversation, Conversations, to_raw
from kvasir_router.dialects.dialect import ABSENT, BoundedDecoder, RoutingFields
from kvasir_router.errors import RequestError

_MARKED_ID = re.compile(rb"resp_([0-9a-f]{8})[0-9a-f]{32}")
_REFERENCE = b'"item_reference"'


def mark_of(host: bytes) -> str:
    """Of an engine, by the `host` that this router writes into its requests."""
    return hashlib.sha256(host).hexdigest()[:8]


def mark_in(text: bytes) -> str | None:
    """That of the first response's or item's id in it."""
    found = _MARKED_ID.search(text)
    return None if found is None else found[1].decode()


class _Fields(RoutingFields, gc=False):
    input: msgspec.Raw = ABSENT
    instructions: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT

    @property
    def holder(self) -> str | None:
        if self.previous_response_id is not ABSENT:
            return mark_in(bytes(self.previous_response_id))
        given = bytes(self.input)
        return mark_in(given) if _REFERENCE in given else None


class Responses(openai.OpenAIErrors, Conversations[_Fields]):
    name = "responses"
    decoder = BoundedDecoder(_Fields)
    end_of_stream: bytes | None = b": end\n\n"

    def given(self, fields: _Fields) -> Sequence[msgspec.Raw]:
        return fields.tools, fields.instructions, fields.input

    def options(self, fields: _Fields) -> Sequence[msgspec.Raw]:
        return fields.reasoning, fields.chat_template_kwargs

    def in_chats_words(self, fields: _Fields) -> Conversation | None:
        if fields.holder is not None:
            return None
        items = input_items(msgspec.json.decode(fields.input))
        chat = chat_messages(msgspec.json.decode(fields.instructions), items)
        tools = [chat_tool(tool) for tool in offered_tools(msgspec.json.decode(fields.tools))]
        seen_by_templates = {"tools": to_raw(tools)} if tools else {}
        reasoning = msgspec.json.decode(fields.reasoning)
        if isinstance(reasoning, dict) and isinstance(effort := reasoning.get("effort"), str):
            seen_by_templates["reasoning_effort"] = to_raw(effort)
        if fields.chat_template_kwargs is not ABSENT:
            seen_by_templates["chat_template_kwargs"] = fields.chat_template_kwargs
        return to_raw(chat), seen_by_templates

    def error_event(self, error: RequestError) -> bytes:
        """How many events there were is not known here."""
        told = {"type": "error", "code": error.code, "message": str(error), "param": error.param, "sequence_number": 0}
        return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"
