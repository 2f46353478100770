"""Anthropic's /v1/messages and /v1/messages/count_tokens: conversations that engines render as those of chat."""

from collections.abc import Sequence

import msgspec

from kvasir_chat.anthropic import chat_messages, chat_tools, is_prefilled, thinking_fields
from kvasir_router.dialects.chat import Conversation, Conversations, to_raw
from kvasir_router.dialects.dialect import ABSENT, BoundedDecoder, Reader, RoutingFields
from kvasir_router.errors import RequestError

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class _Fields(RoutingFields, gc=False):
    system: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT


class AnthropicErrors:
    def error_body(self, error: RequestError) -> bytes:
        """The JSON body {"type": "error", "error": {type, message}}."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": str(error)}})

    def error_event(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + self.error_body(error) + b"\n\n"


class Messages(AnthropicErrors, Conversations[_Fields]):
    name = "messages"
    decoder = BoundedDecoder(_Fields)
    end_of_stream: bytes | None = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def given(self, fields: _Fields) -> Sequence[msgspec.Raw]:
        return fields.tools, fields.system, fields.messages

    def options(self, fields: _Fields) -> Sequence[msgspec.Raw]:
        return fields.thinking, fields.output_config, fields.chat_template_kwargs

    def in_chats_words(self, fields: _Fields) -> Conversation:
        """The header of coding assistants is left out: with it no prompt has a prefix in a cache."""
        messages = msgspec.json.decode(fields.messages)
        chat = chat_messages(msgspec.json.decode(fields.system), messages, drops_client_header=True)
        tools = chat_tools(msgspec.json.decode(fields.tools))
        seen_by_templates = {"continue_final_message": is_prefilled(messages), **({"tools": tools} if tools else {})}
        seen_by_templates |= thinking_fields(*map(msgspec.json.decode, self.options(fields)))
        return to_raw(chat), {name: to_raw(value) for name, value in seen_by_templates.items()}


class CountTokens(AnthropicErrors, Reader[RoutingFields]):
    name = "count_tokens"
