"""Anthropic's Messages API: POST /v1/messages, whole or as a stream, and POST /v1/messages/count_tokens.

Behind its own words a request is one of /v1/chat/completions. A stream begins with its first token, when it is known
how much of the prompt was cached.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.errors import KvasirRuntimeError
from kvasir_runtime.server.body import parse, read_body
from kvasir_runtime.server.chat import ChatRoute
from kvasir_runtime.server.errors import anthropic_error, anthropic_response
from kvasir_runtime.server.messages_request import MessagesChat, MessagesPrompt, MessagesRequest
from kvasir_runtime.server.openai_shape import transfer_params_of
from kvasir_runtime.server.responses import Usage, to_json
from kvasir_runtime.server.serving import Prepared, Serving
from kvasir_runtime.server.typed_events import Told, TypedEventShape, written
from kvasir_runtime.talk.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from kvasir_runtime.transfer.params import KvTransferParams

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
SIGNATURE = "kvasir"
"""Clients send a thought back only with one; nothing is signed."""
UNREADABLE = "INVALID_JSON"
"""Where Anthropic has clients put arguments that are no JSON object."""
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesUsage(msgspec.Struct):
    input_tokens: int
    """Those that were computed."""
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str = SIGNATURE


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(msgspec.Struct):
    id: str
    model: str
    content: list[Block]
    usage: MessagesUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    input_tokens: int


def blocks_of(events: Sequence[Event]) -> list[Block]:
    """Of a whole answer."""
    kinds = {Content: "text", Reasoning: "thinking"}
    blocks: list[Block] = []
    calls = _arguments_by_call(events)
    for kind, group in groupby(events, key=lambda event: kinds.get(type(event), "call")):
        if kind == "call":
            begun = (event for event in group if isinstance(event, CallBegun))
            blocks += [ToolUseBlock(each.call_id or "", each.name, _input(calls[each.index])) for each in begun]
        elif text := "".join(event.text for event in group if isinstance(event, Content | Reasoning)):
            blocks.append(TextBlock(text) if kind == "text" else ThinkingBlock(text))
    return blocks


def _arguments_by_call(events: Sequence[Event]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallBegun):
            texts.setdefault(event.index, "")
        elif isinstance(event, Arguments):
            texts[event.index] += event.text
    return texts


def _input(arguments: str) -> dict[str, Any]:
    """A call that was cut has what there is of its arguments."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {UNREADABLE: arguments}


class Blocks:
    """The content blocks of one answer as events."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None
        self.has_called = False

    def add(self, event: Event) -> Iterator[Told]:
        match event:
            case Content(text=text) if text:
                yield from self._begin_unless_open("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case Reasoning(text=text) if text:
                yield from self._begin_unless_open("thinking", {"thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallBegun(name=name, call_id=call_id):
                self.has_called = True
                yield from self.close()
                yield self._begin("tool_use", {"id": call_id, "name": name, "input": {}})
            case Arguments(text=text) if text:
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnded():
                yield from self.close()

    def close(self) -> Iterator[Told]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"index": self._index}

    def _begin_unless_open(self, kind: str, fields: dict[str, Any]) -> Iterator[Told]:
        if self._open != kind:
            yield from self.close()
            yield self._begin(kind, fields)

    def _begin(self, kind: str, fields: dict[str, Any]) -> Told:
        self._open = kind
        self._index += 1
        return "content_block_start", {"index": self._index, "content_block": {"type": kind} | fields}

    def _delta(self, delta: dict[str, Any]) -> Told:
        return "content_block_delta", {"index": self._index, "delta": delta}


class MessagesShape(TypedEventShape[MessagesChat]):
    def __init__(self, prepared: Prepared[MessagesChat]) -> None:
        self._blocks = Blocks()
        super().__init__(prepared, self._blocks)

    def whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes:
        [sequence] = sequences
        events = self.read(sequence)
        message = self._message(usage)
        message.content = blocks_of(events)
        has_called = any(isinstance(event, CallBegun) for event in events)
        message.stop_reason, message.stop_sequence = self._ending(sequence, usage, has_called=has_called)
        message.kv_transfer_params = transfer_params_of(sequences)
        return to_json(message)

    def begin(self, usage: Usage) -> Iterator[Told]:
        message = self._message(usage)
        message.usage.output_tokens = 0  # of those that are out, however many came at once
        yield "message_start", {"message": message}
        yield "ping", {}

    def finish(self, delta: SequenceDelta, usage: Usage) -> Iterator[Told]:
        yield from self._blocks.close()
        stop_reason, stop_sequence = self._ending(delta, usage, has_called=self._blocks.has_called)
        fields: dict[str, Any] = {
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": _usage(usage),
        }
        if delta.kv_transfer_params is not None:
            fields["kv_transfer_params"] = delta.kv_transfer_params
        yield "message_delta", fields

    def end(self) -> bytes:
        return written("message_stop", {})

    def error_event(self, error: KvasirRuntimeError) -> bytes:
        return b"event: error\ndata: %b\n\n" % to_json(anthropic_error(error)[1])

    def to_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return written(kind, fields)

    def _ending(self, delta: SequenceDelta, usage: Usage, *, has_called: bool) -> tuple[StopReason, str | None]:
        if isinstance(delta.stop_reason, str):
            return "stop_sequence", delta.stop_reason
        if delta.finish_reason != "length":
            return "tool_use" if has_called else "end_turn", None
        is_asked_for = usage.completion_tokens >= (self.wishes.max_tokens or 0)
        return "max_tokens" if is_asked_for else "model_context_window_exceeded", None

    def _message(self, usage: Usage) -> MessageAnswer:
        return MessageAnswer(id=self.heading.id, model=self.heading.model, content=[], usage=_usage(usage))


def _usage(usage: Usage) -> MessagesUsage:
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(usage.prompt_tokens - num_cached, num_cached, usage.completion_tokens)


async def _to_chat(asked: MessagesRequest, serving: Serving, request: Request) -> MessagesChat:
    return asked.to_chat(drops_client_header=serving.drops_client_header)


MESSAGES = ChatRoute(
    path=PATH,
    id_prefix="msg_",
    body=MessagesRequest,
    wishes=_to_chat,
    shape=MessagesShape,
    refusal=anthropic_response,
)


def count_tokens_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post(COUNT_PATH)
    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, serving.max_body_bytes, serving.max_body_seconds)
        limits = serving.limits()
        asked = parse(MessagesPrompt, body)
        serving.check_model(asked.model)
        chat = asked.to_tokenize(drops_client_header=serving.drops_client_header)
        prompt = await serving.prompts.chat_prompt(chat, limits)
        return Response(to_json(TokenCount(len(prompt.token_ids))), media_type="application/json")

    return router
