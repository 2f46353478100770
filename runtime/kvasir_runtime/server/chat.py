"""POST /v1/chat/completions: messages to an assistant's answer, whole or as a stream."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from kvasir_runtime.engine.async_engine import GenerateRequest
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.server.body import read_body
from kvasir_runtime.server.journal import (
    BEGINS_HERE,
    WITHOUT_JOURNAL,
    EventWriter,
    Journal,
    event_writer,
    split_body,
)
from kvasir_runtime.server.logprobs import LogprobsFormatter
from kvasir_runtime.server.parsing import parse
from kvasir_runtime.server.protocol import ChatCompletionRequest, StreamOptions
from kvasir_runtime.server.responses import (
    DONE,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
    to_event,
)
from kvasir_runtime.server.sampling import sampling_params, text_options
from kvasir_runtime.server.serving import Serving, UsageMeter, collect, new_request_id, tenant_of
from kvasir_runtime.server.streaming import answer, event_stream


def chat_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra={"requestBody": _request_schema()})
    async def create_chat_completion(request: Request) -> Response:
        body, journal = split_body(await read_body(request, serving.max_body_bytes), request.headers)
        chat = parse(ChatCompletionRequest, body)
        model = serving.check_model(chat.model)
        generate = await _resolve(serving, chat, tenant_of(request))
        created = journal.created(int(time.time()))
        if not chat.stream:
            return await answer(request, ChatExchange(serving, chat, generate, model, created).completion())
        [generate] = journal.continued([generate], serving.model_digest, serving.limits().vocab_size)
        writer = event_writer(request.headers, [generate], created, serving.model_digest)
        exchange = ChatExchange(serving, chat, generate, model, created, journal, writer)
        return await event_stream(request, exchange.events(), is_resumable=writer.is_resumable)

    return router


async def _resolve(serving: Serving, chat: ChatCompletionRequest, tenant: str) -> GenerateRequest:
    limits = serving.limits()
    prompt_token_ids = await serving.prompts.chat_prompt(chat, limits.max_model_len)
    sampling = sampling_params(
        chat,
        max_tokens=chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        prompt_logprobs=None,
        num_prompt_tokens=len(prompt_token_ids),
        defaults=serving.defaults,
        limits=limits,
    )
    return GenerateRequest(
        request_id=new_request_id("chatcmpl"),
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        text=text_options(chat),
        n=chat.n or 1,
        priority=chat.priority,
        tenant=tenant,
        cache_salt=chat.cache_salt,
    )


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """One request under way: the client's wishes and the resolved request."""

    serving: Serving
    chat: ChatCompletionRequest
    generate: GenerateRequest
    model: str
    created: int
    journal: Journal = BEGINS_HERE
    writer: EventWriter = WITHOUT_JOURNAL

    async def completion(self) -> ChatCompletion:
        with self.serving.engine.generate([self.generate]) as generation:
            sequences = await collect(generation, self.generate.n)
        meter = self._meter()
        for sequence in sequences:
            meter.count(sequence)
        return ChatCompletion(
            id=self.generate.request_id,
            created=self.created,
            model=self.model,
            choices=[self._choice(sequence) for sequence in sequences],
            usage=meter.usage(),
            prompt_token_ids=self._prompt_token_ids(),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self.chat.stream_options or StreamOptions()
        meter = self._meter()
        has_begun = self.journal.has_begun
        with self.serving.engine.generate([self.generate], self.journal.sequences) as generation:
            async for deltas in generation:
                events = [] if has_begun else [self.writer.begin(self._role_event(options, meter))]
                has_begun = True
                for delta in deltas:
                    meter.count(delta)
                    events.append(self.writer.write(delta, self._event(delta, options, meter)))
                if block := b"".join(events):
                    yield block
        if options.include_usage and not self.journal.has_usage:
            yield self.writer.write_usage(to_event(self._chunk([], meter.usage())))
        yield DONE

    def _meter(self) -> UsageMeter:
        return UsageMeter(len(self.generate.prompt_token_ids), self.generate.n, self.journal.sequences.values())

    def _choice(self, sequence: SequenceDelta) -> ChatChoice:
        return ChatChoice(
            index=sequence.index,
            message=ChatAnswer("assistant", sequence.text),
            logprobs=self._logprobs(sequence),
            finish_reason=sequence.finish_reason or "abort",
            stop_reason=sequence.stop_reason,
            token_ids=sequence.token_ids if self.chat.return_token_ids else UNSET,
        )

    def _is_worth_sending(self, delta: SequenceDelta) -> bool:
        """Half a character or the beginning of a stop string shows nothing yet."""
        return bool(
            delta.text or delta.finish_reason or delta.logprobs or (delta.token_ids and self.chat.return_token_ids)
        )

    def _chunk_choice(self, delta: SequenceDelta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.stop_reason is None else delta.stop_reason,
            token_ids=delta.token_ids if self.chat.return_token_ids else UNSET,
        )

    def _role_event(self, options: StreamOptions, meter: UsageMeter) -> bytes:
        choices = [
            ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            for index in range(self.generate.n)
        ]
        chunk = self._chunk(choices, self._chunk_usage(options, meter))
        chunk.prompt_token_ids = self._prompt_token_ids()
        return to_event(chunk)

    def _event(self, delta: SequenceDelta, options: StreamOptions, meter: UsageMeter) -> bytes:
        if not self._is_worth_sending(delta):
            return b""
        return to_event(self._chunk([self._chunk_choice(delta)], self._chunk_usage(options, meter)))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self.generate.request_id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _chunk_usage(self, options: StreamOptions, meter: UsageMeter) -> Usage | UnsetType | None:
        if options.continuous_usage_stats:
            return meter.usage()
        return None if options.include_usage else UNSET

    def _logprobs(self, delta: SequenceDelta) -> ChatLogprobs | None:
        if not self.chat.logprobs:
            return None
        tokens_as_ids = bool(self.chat.return_tokens_as_token_ids)
        return LogprobsFormatter(self.serving.tokenizer, tokens_as_ids=tokens_as_ids).chat(delta.logprobs)

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self.generate.prompt_token_ids if self.chat.return_token_ids else UNSET


def _request_schema() -> dict[str, object]:
    return {"content": {"application/json": {"schema": ChatCompletionRequest.model_json_schema()}}}
