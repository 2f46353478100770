"""What clients of OpenAI's Responses API may send, and the chat request that it comes to.

Items are read where they become a conversation (`kvasir_chat.open_responses`), which names those that are wrong. Coding
assistants that speak this API send new fields with each of their releases, so what is not known is taken. Fields of
/v1/chat/completions that OpenAI has no name for here (`seed`, `min_p`, ...) mean what they mean there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from kvasir_chat.open_responses import (
    Item,
    OfferedTool,
    chat_messages,
    chat_tool,
    input_format,
    input_items,
    offered_tools,
    tool_choice,
)
from kvasir_runtime.errors import GrammarError, InvalidRequestError
from kvasir_runtime.server.body import UNSUPPORTED, LenientBody, checked
from kvasir_runtime.server.errors import UnknownResponseError
from kvasir_runtime.server.prompts import translated
from kvasir_runtime.server.protocol import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    KvTransferFields,
    Temperature,
    TopP,
    Whole,
    chats_fields,
)
from kvasir_runtime.server.response_store import IN_PROGRESS, Conversation, ResponseStore
from kvasir_runtime.server.tools import MAX_TOOLS
from kvasir_runtime.structured.json_quoted import json_quoted_lark, json_quoted_regex

_REFUSED = ("conversation", "prompt")
_LOGPROBS = "message.output_text.logprobs"
_REFERENCE = "item_reference"
_QUOTED = {"lark": json_quoted_lark, "regex": json_quoted_regex}


class _Options(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)


class ReasoningOptions(_Options):
    effort: str | None = None
    summary: str | None = None


class TextFormat(_Options):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(_Options):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(LenientBody):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    """Answered at once, and made when nobody waits for it."""
    stream: bool | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    """Goes before it: what routers write for a prefill that another engine goes on from."""
    kv_transfer_params: KvTransferFields | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Nothing is left out in either case: a conversation that does not fit is refused."""
    include: list[str] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    def check_wishes(self) -> None:
        for name in _REFUSED:
            if self.extra(name):
                raise InvalidRequestError(f"{name}: {UNSUPPORTED}", name)
        if self.background and self.store is False:
            raise InvalidRequestError("store: a response in the background is kept, to be asked for", "store")
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            raise InvalidRequestError(f"top_logprobs, {_LOGPROBS}: {UNSUPPORTED}", "top_logprobs")

    @property
    def is_kept(self) -> bool:
        """As OpenAI has it, unless the client says otherwise; by the engine that answers."""
        transfer = self.kv_transfer_params
        return self.store is not False and (transfer is None or not transfer.do_remote_decode)

    def to_chat(self, items: Sequence[Item], num_earlier: int) -> "ResponsesChat":
        """`items`: the whole conversation. Raises InvalidRequestError."""
        offered = translated(partial(offered_tools, self.tools))
        own = {
            "model": self.model,
            "messages": translated(partial(chat_messages, self.instructions, items, num_earlier)),
            "tools": translated(lambda: [chat_tool(tool) for tool in offered]),
            **translated(partial(tool_choice, self.tool_choice, offered)),
            "max_tokens": self.max_tokens or self.max_output_tokens,
            "kv_transfer_params": self.kv_transfer_params,
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            **{name: getattr(self, name) for name in ("stream", "temperature", "top_p", "parallel_tool_calls")},
        }
        chat = checked(ResponsesChat, chats_fields(self, own))
        chat.bind(self, {tool.called_name: tool for tool in offered})
        return chat

    def _response_format(self) -> dict[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        if wanted.json_schema is None:
            raise InvalidRequestError("text.format: type json_schema needs name and schema", "text.format")
        schema = {"name": wanted.name, "schema": wanted.json_schema, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}


@dataclass(frozen=True, slots=True)
class Keeper:
    """Where a response is kept, and behind which conversation."""

    store: ResponseStore
    tenant: str
    earlier: list[msgspec.Raw]
    given: list[msgspec.Raw]

    def keep(self, response_id: str, response: bytes, made: list[msgspec.Raw]) -> None:
        self.store.put(self.tenant, response_id, response, Conversation(self.earlier, self.given, made))


class ResponsesChat(ChatCompletionRequest):
    """A request of this API in chat's words."""

    _asked: ResponsesRequest = PrivateAttr()
    _tools: Mapping[str, OfferedTool] = PrivateAttr()
    _keeper: Keeper | None = PrivateAttr(None)

    def bind(self, asked: ResponsesRequest, tools: Mapping[str, OfferedTool]) -> None:
        """What the answer repeats, and what its calls are made of: tools by the names that the model knows."""
        self._asked, self._tools = asked, tools
        for tool in self.tools or ():
            if (grammar := _input_grammar(tools[tool.function.name])) is not None:
                tool.hold_input(grammar)

    def keep_with(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @property
    def asked(self) -> ResponsesRequest:
        return self._asked

    @property
    def offered_tools(self) -> Mapping[str, OfferedTool]:
        return self._tools

    @property
    def keeper(self) -> Keeper | None:
        """None: it is not to be kept."""
        return self._keeper

    @property
    def token_limit_field(self) -> str:
        return "max_output_tokens"


def _input_grammar(tool: OfferedTool) -> str | None:
    """Raises InvalidRequestError."""
    wanted = input_format(tool)
    if wanted is None:
        return None
    syntax, definition = wanted
    if syntax not in _QUOTED:
        known = " and ".join(_QUOTED)
        raise InvalidRequestError(
            f"{tool.field}.format.syntax: {syntax[:40]!r} was given; known are {known}", tool.field
        )
    try:
        return _QUOTED[syntax](definition)
    except GrammarError as error:
        raise InvalidRequestError(f"{tool.field}.format.definition: {error}", tool.field) from error


async def in_chats_words(asked: ResponsesRequest, store: ResponseStore, tenant: str) -> ResponsesChat:
    """Raises InvalidRequestError, and UnknownResponseError for what is not kept, or not any more."""
    earlier = await _earlier(asked, store, tenant)
    given = [await _resolved(item, store, tenant) for item in translated(partial(input_items, asked.input))]
    chat = asked.to_chat([*map(msgspec.json.decode, earlier), *given], len(earlier))
    if asked.is_kept:
        chat.keep_with(Keeper(store, tenant, earlier, [msgspec.Raw(msgspec.json.encode(item)) for item in given]))
    return chat


async def _earlier(asked: ResponsesRequest, store: ResponseStore, tenant: str) -> list[msgspec.Raw]:
    if asked.previous_response_id is None:
        return []
    kept = await store.get(tenant, asked.previous_response_id)
    if kept is None:
        raise UnknownResponseError(asked.previous_response_id, "previous_response_id")
    if kept.status == IN_PROGRESS:
        told = f"previous_response_id: {asked.previous_response_id[:200]!r} is not there yet; wait until it has ended"
        raise InvalidRequestError(told, "previous_response_id")
    return kept.conversation.items


async def _resolved(item: Item, store: ResponseStore, tenant: str) -> Item:
    """An item itself, or the one that it names."""
    if item.get("type") != _REFERENCE:
        return item
    name = str(item.get("id"))
    kept = await store.item(tenant, name)
    if kept is None:
        raise UnknownResponseError(name, "input")
    decoded: Item = msgspec.json.decode(kept)
    return decoded
