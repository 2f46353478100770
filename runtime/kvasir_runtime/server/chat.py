"""POST /v1/chat/completions: messages to an assistant's answer, whole or as a stream."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from kvasir_runtime.engine.async_engine import GenerateRequest
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.server.body import read_body
from kvasir_runtime.server.exchange import ChunkUsage, Exchange
from kvasir_runtime.server.journal import body_limit, event_writer, split_body
from kvasir_runtime.server.kv_transfer import shown, transfer_params
from kvasir_runtime.server.logprobs import LogprobsFormatter
from kvasir_runtime.server.parsing import parse
from kvasir_runtime.server.protocol import ChatCompletionRequest, StreamOptions
from kvasir_runtime.server.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
    to_event,
    to_json,
    to_part,
)
from kvasir_runtime.server.sampling import beam_search, sampling_params, text_options
from kvasir_runtime.server.serving import Serving, http_request_id_of, new_request_id, tenant_of
from kvasir_runtime.server.streaming import answer, event_stream


def chat_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra={"requestBody": _request_schema()})
    async def create_chat_completion(request: Request) -> Response:
        max_bytes = body_limit(serving.max_body_bytes, request.headers)
        body, journal = split_body(await read_body(request, max_bytes, serving.max_body_seconds), request.headers)
        chat = parse(ChatCompletionRequest, body)
        model = serving.check_model(chat.model)
        resolved = await _resolve(serving, chat, request)
        created = journal.created(int(time.time()))
        requests = journal.continued(
            [resolved],
            serving.model_digest,
            serving.limits().vocab_size,
            is_stream=bool(chat.stream),
            kv_transfer=serving.kv_transfer,
        )
        writer = event_writer(request.headers, requests, created, serving.model_digest, journal)
        exchange = Exchange(
            engine=serving.engine,
            admission=serving.admission,
            requests=requests,
            shape=ChatShape(serving, chat, requests[0], model, created),
            shapers=serving.shapers,
            num_returned=chat.num_returned,
            stream_options=chat.stream_options or StreamOptions(),
            journal=journal,
            writer=writer,
            http_request_id=http_request_id_of(request),
        )
        if not chat.stream:
            return await answer(request, exchange.whole())
        return await event_stream(request, exchange.events(), is_resumable=writer.is_resumable)

    return router


async def _resolve(serving: Serving, chat: ChatCompletionRequest, request: Request) -> GenerateRequest:
    limits = serving.limits()
    prompt_token_ids = await serving.prompts.chat_prompt(chat, limits)
    sampling = sampling_params(
        chat,
        max_tokens=chat.token_limit,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        prompt_logprobs=None,
        num_prompt_tokens=len(prompt_token_ids),
        defaults=serving.defaults,
        limits=limits,
    )
    return GenerateRequest(
        request_id=new_request_id("chatcmpl"),
        spec=RequestSpec(
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            beam=beam_search(chat),
            priority=chat.priority,
            tenant=tenant_of(request),
            cache_salt=chat.cache_salt,
            kv_transfer_params=transfer_params(request, chat, serving.kv_transfer),
        ),
        text=text_options(chat),
        n=chat.num_sequences,
    )


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Chat completions: the first event names the role, the others bring text."""

    serving: Serving
    chat: ChatCompletionRequest
    request: GenerateRequest
    model: str
    created: int

    def shown(self, delta: SequenceDelta) -> SequenceDelta:
        return delta

    def whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes:
        completion = ChatCompletion(
            id=self.request.request_id,
            created=self.created,
            model=self.model,
            choices=[to_part(self._choice(sequence)) for sequence in sequences],
            usage=usage,
            prompt_token_ids=self._prompt_token_ids(),
            kv_transfer_params=shown(sequences),
        )
        return to_json(completion)

    def first_event(self, usage: ChunkUsage) -> bytes:
        role = ChatDelta(role="assistant", content="")
        chunk = self._chunk([ChatChunkChoice(index=index, delta=role) for index in range(self.request.n)], usage)
        chunk.prompt_token_ids = self._prompt_token_ids()
        return to_event(chunk)

    def event(self, delta: SequenceDelta, usage: ChunkUsage) -> bytes:
        if not self._is_worth_sending(delta):
            return b""
        chunk = self._chunk([self._chunk_choice(delta)], usage)
        chunk.kv_transfer_params = shown([delta])
        return to_event(chunk)

    def usage_event(self, usage: Usage) -> bytes:
        return to_event(self._chunk([], usage))

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

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> ChatChunk:
        return ChatChunk(
            id=self.request.request_id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _logprobs(self, delta: SequenceDelta) -> ChatLogprobs | None:
        if not self.chat.logprobs:
            return None
        tokens_as_ids = bool(self.chat.return_tokens_as_token_ids)
        return LogprobsFormatter(self.serving.tokenizer, tokens_as_ids=tokens_as_ids).chat(delta.logprobs)

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self.request.spec.prompt_token_ids if self.chat.return_token_ids else UNSET


def _request_schema() -> dict[str, object]:
    return {"content": {"application/json": {"schema": ChatCompletionRequest.model_json_schema()}}}
