"""OpenAI's POST /v1/chat/completions, whole or as a stream: from messages to an assistant's answer."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.server.answer_formats import AnswerFormats
from kvasir_runtime.server.body import Body
from kvasir_runtime.server.errors import error_response
from kvasir_runtime.server.exchange import UsageMeter
from kvasir_runtime.server.logprobs import check_scored
from kvasir_runtime.server.openai_shape import ChunkUsage, OpenAiShape, to_event, transfer_params_of
from kvasir_runtime.server.prompts import Prompt, PromptBuilder
from kvasir_runtime.server.protocol import ChatCompletionRequest
from kvasir_runtime.server.reading import Reading, reading_of
from kvasir_runtime.server.resolving import Limits, most_prompt_tokens
from kvasir_runtime.server.responses import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    to_json,
    to_part,
)
from kvasir_runtime.server.serving import Prepared, Route, as_given
from kvasir_runtime.talk.events import Arguments, CallBegun, Content, Event, Reasoning

Asked = TypeVar("Asked", bound=Body)
Chat = TypeVar("Chat", bound=ChatCompletionRequest)


async def chat_prompts(builder: PromptBuilder, chat: ChatCompletionRequest, limits: Limits) -> list[Prompt]:
    prompts = [await builder.chat_prompt(chat, limits, most_prompt_tokens(chat, limits.max_model_len))]
    if chat.prompt_logprobs is not None:
        check_scored(prompts, 1, chat.prompt_logprobs)
    return prompts


def chat_reading(formats: AnswerFormats, wishes: ChatCompletionRequest, prompts: Sequence[Prompt]) -> Reading | None:
    if not wishes.tools and formats.reasoning is None:
        return None  # text is all that there is to read
    return reading_of(
        formats,
        wishes.call_rule,
        prompts[0].text,
        includes_reasoning=wishes.include_reasoning,
        thinking_budget=wishes.thinking_token_budget,
    )


class ChatShape(OpenAiShape[ChatCompletionRequest]):
    """The first event names the role, the others bring text, thoughts and calls."""

    def __init__(self, prepared: Prepared[ChatCompletionRequest]) -> None:
        super().__init__(prepared)
        self._reader = prepared.reader()

    def skip(self, sequence: SequenceDelta) -> None:
        if self._reader is not None:
            self._reader.read(sequence)

    def whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes:
        choices = [to_part(self._choice(sequence)) for sequence in sequences]
        completion = ChatCompletion(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            choices=choices,
            usage=self._with_details(usage),
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=self.prompt_logprobs_of(sequences[0]),
            kv_transfer_params=transfer_params_of(sequences),
        )
        return to_json(completion)

    def first_event(self, meter: UsageMeter) -> bytes:
        role = ChatDelta(role="assistant", content="")
        choices = [ChatChunkChoice(index=index, delta=role) for index in range(self.wishes.num_sequences)]
        chunk = self._chunk(choices, self.chunk_usage(meter))
        chunk.prompt_token_ids = self._prompt_token_ids()
        return to_event(chunk)

    def event(self, delta: SequenceDelta, meter: UsageMeter) -> bytes:
        finish_reason: str | None = delta.finish_reason
        if self._reader is None:
            chat_delta = ChatDelta(content=delta.text)
        else:
            chat_delta = delta_of(self._reader.read(delta))
            finish_reason = self._reader.finish_reason(delta)
            delta = msgspec.structs.replace(delta, text="")
        if not (self.is_worth_sending(delta) or (self._reader is not None and chat_delta != ChatDelta())):
            return b""
        choice = ChatChunkChoice(
            index=delta.index,
            delta=chat_delta,
            logprobs=self._logprobs(delta),
            finish_reason=finish_reason,
            stop_reason=UNSET if delta.stop_reason is None else delta.stop_reason,
            token_ids=delta.token_ids if self.wishes.return_token_ids else UNSET,
        )
        chunk = self._chunk([choice], self.chunk_usage(meter))
        if delta.kv_transfer_params is not None:
            chunk.kv_transfer_params = delta.kv_transfer_params
        return to_event(chunk)

    def usage_event(self, usage: Usage) -> bytes:
        return to_event(self._chunk([], self._with_details(usage))) if self.stream_options.include_usage else b""

    def _with_details(self, usage: Usage) -> Usage:
        num_tokens = None if self._reader is None else self._reader.num_reasoning_tokens
        if num_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(num_tokens)
        return usage

    def _choice(self, sequence: SequenceDelta) -> ChatChoice:
        finish_reason: str | None = sequence.finish_reason
        if self._reader is None:
            message = ChatAnswer("assistant", sequence.text)
        else:
            message = answer_of(self._reader.read(sequence))
            finish_reason = self._reader.finish_reason(sequence)
        return ChatChoice(
            index=sequence.index,
            message=message,
            logprobs=self._logprobs(sequence),
            finish_reason=finish_reason or "abort",
            stop_reason=sequence.stop_reason,
            token_ids=sequence.token_ids if self.wishes.return_token_ids else UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> ChatChunk:
        heading = self.heading
        return ChatChunk(id=heading.id, created=heading.created, model=heading.model, choices=choices, usage=usage)

    def _logprobs(self, delta: SequenceDelta) -> ChatLogprobs | None:
        return self.formatter().chat(delta.logprobs) if self.wishes.logprobs else None

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self.prompts[0].token_ids if self.wishes.return_token_ids else UNSET


def answer_of(events: Sequence[Event]) -> ChatAnswer:
    """Without text where there is nothing but calls or thoughts."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)) or UNSET
    calls = _calls_of(events)
    is_silent = not content and (calls or reasoning)
    return ChatAnswer(
        "assistant",
        None if is_silent else content,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or UNSET,
    )


def _calls_of(events: Sequence[Event]) -> list[ToolCall]:
    pieces: dict[int, list[str]] = {event.index: [] for event in events if isinstance(event, CallBegun)}
    for event in events:
        if isinstance(event, Arguments):
            pieces[event.index].append(event.text)
    return [
        ToolCall(event.call_id or "", CalledFunction(event.name, "".join(pieces[event.index])))
        for event in events
        if isinstance(event, CallBegun)
    ]


def delta_of(events: Sequence[Event]) -> ChatDelta:
    """What of each kind came, in one delta."""
    content = "".join(event.text for event in events if isinstance(event, Content)) or UNSET
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)) or UNSET
    calls: list[ToolCallDelta] = []
    for event in events:
        match event:
            case CallBegun(index=index, name=name, call_id=call_id):
                calls.append(ToolCallDelta(index, FunctionDelta("", name), call_id or "", "function"))
            case Arguments(index=index, text=text):
                calls.append(ToolCallDelta(index, FunctionDelta(text)))
    return ChatDelta(content=content, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls or UNSET)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRoute(Route[Asked, Chat]):
    """Of an API whose requests are chat's, in whatever words."""

    prompts: Callable[[PromptBuilder, Chat, Limits], Awaitable[list[Prompt]]] = chat_prompts
    reading: Callable[[AnswerFormats, Chat, Sequence[Prompt]], Reading | None] = chat_reading


CHAT = ChatRoute(
    path="/v1/chat/completions",
    id_prefix="chatcmpl-",
    body=ChatCompletionRequest,
    wishes=as_given,
    shape=ChatShape,
    refusal=error_response,
)
