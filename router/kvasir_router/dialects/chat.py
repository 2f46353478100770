"""OpenAI's /v1/chat/completions: messages, which an engine renders with its chat template.

Rendering is the engine's. Here the messages become bytes in their order, so that conversations that begin alike have
bytes that begin alike. An image or a sound is a digest in its place: it tells prompts apart and is not counted as text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_digest

from kvasir_chat.messages import ConversationRefusedError
from kvasir_router.dialects import openai
from kvasir_router.dialects.dialect import (
    ABSENT,
    BoundedDecoder,
    Fields,
    Prompt,
    Reader,
    RoutingFields,
    is_too_much,
    seed,
)

Conversation = tuple[msgspec.Raw, Mapping[str, msgspec.Raw]]
"""Messages as chat has them, and fields that its templates see."""


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


_TEMPLATE_FIELDS = tuple(name for name in _Fields.__annotations__ if name != "messages")


class Conversations(Reader[Fields]):
    """APIs whose prompts are conversations, which are chat's in other words."""

    num_output_tokens = openai.EXPECTED_OUTPUT_TOKENS
    has_kv_transfer = True

    def given(self, fields: Fields) -> Sequence[msgspec.Raw]:
        """What becomes the prompt, in the order in which it grows: the conversation last."""
        raise NotImplementedError

    def options(self, fields: Fields) -> Sequence[msgspec.Raw]:
        """What else decides how it looks."""
        raise NotImplementedError

    def in_chats_words(self, fields: Fields) -> Conversation | None:
        """None: only an engine knows it. Raises ConversationRefusedError."""
        raise NotImplementedError

    def prompt_of(self, fields: Fields, model: str | None) -> Prompt | None:
        given = self.given(fields)
        if given[-1] is ABSENT:
            return None
        if fields.is_large and is_too_much(*given, *self.options(fields)):
            return unread_prompt(given, model, fields)
        try:
            conversation = self.in_chats_words(fields)
        except ConversationRefusedError:  # as the engine will
            conversation = None
        if conversation is None:
            return unread_prompt(given, model, fields)
        return conversation_prompt(*conversation, model, fields)


class Chat(openai.OpenAIErrors, Conversations[_Fields]):
    name = "chat"
    decoder = BoundedDecoder(_Fields)
    end_of_stream: bytes | None = openai.END_OF_STREAM

    def given(self, fields: _Fields) -> Sequence[msgspec.Raw]:
        return fields.tools, fields.messages

    def options(self, fields: _Fields) -> Sequence[msgspec.Raw]:
        return [getattr(fields, name) for name in _TEMPLATE_FIELDS if name != "tools"]

    def in_chats_words(self, fields: _Fields) -> Conversation:
        given = {name: getattr(fields, name) for name in _TEMPLATE_FIELDS}
        return fields.messages, {name: value for name, value in given.items() if value is not ABSENT}


def conversation_prompt(
    messages: msgspec.Raw, template_fields: Mapping[str, msgspec.Raw], model: str | None, fields: RoutingFields
) -> Prompt:
    """Of chat's messages and fields, into which other APIs' are translated. Raises msgspec.DecodeError."""
    return Prompt(
        conversation_bytes(messages, template_fields.get("tools", ABSENT)),
        is_token_ids=False,
        seed=seed(Chat.name, model, fields),
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
