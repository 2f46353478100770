"""Anthropic's /v1/messages and /v1/messages/count_tokens: conversations that engines render as those of chat."""

import msgspec

from kvasir_chat.anthropic import chat_messages, chat_tools, is_prefilled, thinking_fields
from kvasir_chat.messages import ConversationRefusedError
from kvasir_router.dialects import openai
from kvasir_router.dialects.chat import conversation_prompt, to_raw, unread_prompt
from kvasir_router.dialects.dialect import ABSENT, BoundedDecoder, Prompt, RoutingFields, is_too_much
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


_decoder = BoundedDecoder(_Fields)
_routing_decoder = BoundedDecoder(RoutingFields)


class AnthropicErrors:
    error_schema = "AnthropicError"

    def error_body(self, error: RequestError) -> bytes:
        """The JSON body {"type": "error", "error": {type, message}}."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": str(error)}})

    def error_event(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + self.error_body(error) + b"\n\n"


class Messages(AnthropicErrors):
    name = "messages"
    end_of_stream: bytes | None = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    num_output_tokens = openai.EXPECTED_OUTPUT_TOKENS
    has_kv_transfer = True

    def read(self, body: bytes) -> RoutingFields:
        return _decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        """The header of coding assistants is left out: with it no prompt has a prefix in a cache."""
        assert isinstance(fields, _Fields)
        if fields.messages is ABSENT:
            return None
        given = (fields.tools, fields.system, fields.messages)
        options = (fields.thinking, fields.output_config, fields.chat_template_kwargs)
        if fields.is_large and is_too_much(*given, *options):
            return unread_prompt(given, model, fields)
        decoded = msgspec.json.decode(fields.messages)
        try:
            chat = chat_messages(msgspec.json.decode(fields.system), decoded, drops_client_header=True)
            tools = chat_tools(msgspec.json.decode(fields.tools))
        except ConversationRefusedError:  # as the engine will
            return unread_prompt(given, model, fields)
        messages, template_fields = to_raw(chat), {"continue_final_message": to_raw(is_prefilled(decoded))}
        if tools:
            template_fields["tools"] = to_raw(tools)
        for name, value in thinking_fields(*map(msgspec.json.decode, options)).items():
            template_fields[name] = to_raw(value)
        return conversation_prompt(messages, template_fields, model, fields)


class CountTokens(AnthropicErrors):
    """An engine answers it without its device, so there is nothing to prefill."""

    name = "count_tokens"
    end_of_stream: bytes | None = None
    num_output_tokens = 0
    has_kv_transfer = False

    def read(self, body: bytes) -> RoutingFields:
        return _routing_decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        return None
