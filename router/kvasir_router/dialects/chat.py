"""OpenAI's /v1/chat/completions: messages, which an engine renders with its chat template.

Rendering is the engine's. Here the messages become bytes in their order, so that conversations that begin alike have
bytes that begin alike. An image or a sound is a digest in its place: it tells prompts apart and is not counted as text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_digest

from kvasir_router.dialects import openai
from kvasir_router.dialects.dialect import ABSENT, BoundedDecoder, Prompt, RoutingFields, is_too_much


class _Fields(RoutingFields, gc=False):
    messages: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    reasoning_effort: msgspec.Raw = ABSENT
    add_generation_prompt: msgspec.Raw = ABSENT
    continue_final_message: msgspec.Raw = ABSENT
    add_special_tokens: msgspec.Raw = ABSENT


_TEMPLATE_FIELDS = (
    "tools",
    "tool_choice",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
_decoder = BoundedDecoder(_Fields)


class Chat(openai.OpenAIErrors):
    name = "chat"
    end_of_stream: bytes | None = openai.END_OF_STREAM
    num_output_tokens = openai.EXPECTED_OUTPUT_TOKENS
    has_kv_transfer = True

    def read(self, body: bytes) -> RoutingFields:
        return _decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        assert isinstance(fields, _Fields)
        if fields.messages is ABSENT:
            return None
        template_fields = {name: value for name in _TEMPLATE_FIELDS if (value := getattr(fields, name)) is not ABSENT}
        if fields.is_large and is_too_much(fields.messages, *template_fields.values()):
            return unread_prompt((fields.tools, fields.messages), model, fields)
        return conversation_prompt(fields.messages, template_fields, model, fields)


def conversation_prompt(
    messages: msgspec.Raw, template_fields: Mapping[str, msgspec.Raw], model: str | None, fields: RoutingFields
) -> Prompt:
    """Of chat's messages and fields, into which other APIs' are translated. Raises msgspec.DecodeError."""
    return Prompt(
        conversation_bytes(messages, template_fields.get("tools", ABSENT)),
        is_token_ids=False,
        seed=openai.seed(Chat.name, model, fields),
        model=model,
        cache_salt=fields.cache_salt,
        messages=messages,
        template_fields=tuple(template_fields.items()),
    )


def unread_prompt(given: Sequence[msgspec.Raw], model: str | None, fields: RoutingFields) -> Prompt:
    """Of what is too much to read, or refused, as it came."""
    raw = b"\n".join(bytes(part) for part in given if part is not ABSENT)
    return openai.raw_prompt(raw, Chat.name, model, fields)


def to_raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def conversation_bytes(messages: msgspec.Raw, tools: msgspec.Raw = ABSENT) -> bytes:
    """Tools first, where chat templates put them. Raises msgspec.DecodeError."""
    decoded = msgspec.json.decode(messages)
    parts = [] if tools is ABSENT else [_json_bytes(msgspec.json.decode(tools))]
    parts.extend(_message_bytes(message) for message in (decoded if isinstance(decoded, list) else [decoded]))
    return b"\n".join(parts)


def _message_bytes(message: Any) -> bytes:
    """Role, tool calls and what else there is with sorted keys, then the text as it is."""
    if not isinstance(message, dict):
        return _json_bytes(message)
    content = message.pop("content", None)
    text = b"".join(map(_part_bytes, content)) if isinstance(content, list) else _part_bytes(content)
    return _json_bytes(message) + text


def _part_bytes(part: Any) -> bytes:
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, dict) and isinstance(text := part.get("text"), str):
        return text.encode()
    return b"" if part is None else xxh3_64_digest(_json_bytes(part))


def _json_bytes(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
