"""What clients of Anthropic's Messages API may send, and the chat request that it comes to.

Blocks are read where they become a conversation (`kvasir_chat.anthropic`), which names those that are wrong. Clients of
this API send new fields with each of their releases, so what is not known is taken. Fields of /v1/chat/completions that
Anthropic has no name for (`seed`, `min_p`, `chat_template_kwargs`, ...) mean here what they mean there.
"""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvasir_chat.anthropic import chat_messages, chat_tools, is_prefilled, thinking_fields, tool_choice
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.server.body import UNSUPPORTED, LenientBody, checked
from kvasir_runtime.server.prompts import translated
from kvasir_runtime.server.protocol import (
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    ChatCompletionRequest,
    StopString,
    Temperature,
    TokenizeChatRequest,
    TopK,
    TopP,
    Whole,
    chats_fields,
)
from kvasir_runtime.server.tools import MAX_TOOLS

_REFUSED = ("container", "mcp_servers")
"""What only Anthropic's own servers can do, and an answer without would not be what was asked for."""


class _Options(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class Thinking(_Options):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Whole, Field(ge=1)] | None = None


class OutputFormat(_Options):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Options):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesPrompt(LenientBody):
    """POST /v1/messages/count_tokens, and what of a request for an answer becomes its prompt."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """As `output_config.format` was called first."""

    def check_wishes(self) -> None:
        for name in _REFUSED:
            if self.extra(name):
                raise InvalidRequestError(f"{name}: {UNSUPPORTED}", name)

    def to_tokenize(self, *, drops_client_header: bool) -> TokenizeChatRequest:
        """Raises InvalidRequestError."""
        return checked(TokenizeChatRequest, self._prompt(drops_client_header))

    def _prompt(self, drops_client_header: bool) -> dict[str, Any]:
        messages = partial(chat_messages, self.system, self.messages, drops_client_header=drops_client_header)
        return {
            "model": self.model,
            "messages": translated(messages),
            "continue_final_message": is_prefilled(self.messages),
            "tools": translated(partial(chat_tools, self.tools)),
            **thinking_fields(_plain(self.thinking), _plain(self.output_config), self.extra("chat_template_kwargs")),
        }


class MessagesChat(ChatCompletionRequest):
    """A request of this API in chat's words. Its bound on tokens may exceed the context: it is sent without knowing
    the model, and how an answer ended says whether it was cut there.
    """

    @property
    def is_cut_to_context(self) -> bool:
        return True


class MessagesRequest(MessagesPrompt):
    """POST /v1/messages."""

    max_tokens: Annotated[Whole, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None

    def to_chat(self, *, drops_client_header: bool) -> MessagesChat:
        """Raises InvalidRequestError."""
        asked = translated(partial(tool_choice, self.tool_choice))
        if not self.tools and asked.get("tool_choice") in ("auto", "none"):
            asked = {}
        own = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        own["stop"] = self.stop_sequences
        own["thinking_token_budget"] = None if self.thinking is None else self.thinking.budget_tokens
        own["response_format"] = self._response_format()
        return checked(MessagesChat, chats_fields(self, self._prompt(drops_client_header) | asked | own))

    def _response_format(self) -> dict[str, Any] | None:
        config = self.output_config
        wanted = self.output_format if config is None or config.format is None else config.format
        if wanted is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.json_schema, "strict": True}}


def _plain(options: BaseModel | None) -> dict[str, Any] | None:
    return None if options is None else options.model_dump()
