"""POST /v1/completions: prompts as text or token ids, continued; whole or as a stream."""

import dataclasses
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from kvasir_runtime.engine.async_engine import GenerateRequest
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.engine.messages import TokenLogprobs
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
from kvasir_runtime.server.prompts import Prompt
from kvasir_runtime.server.protocol import CompletionRequest, StreamOptions
from kvasir_runtime.server.responses import DONE, Completion, CompletionChoice, CompletionLogprobs, Usage, to_event
from kvasir_runtime.server.sampling import Limits, sampling_params, text_options
from kvasir_runtime.server.serving import Serving, UsageMeter, collect, new_request_id, tenant_of
from kvasir_runtime.server.streaming import answer, event_stream

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for this route."""


def completion_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra={"requestBody": _request_schema()})
    async def create_completion(request: Request) -> Response:
        body, journal = split_body(await read_body(request, serving.max_body_bytes), request.headers)
        wishes = parse(CompletionRequest, body)
        model = serving.check_model(wishes.model)
        limits = serving.limits()
        prompts = await serving.prompts.completion_prompts(
            wishes.prompt,
            add_special_tokens=wishes.add_special_tokens,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
        )
        resolve = _Resolver(serving, wishes, limits, new_request_id("cmpl"), tenant_of(request))
        requests = [resolve(prompt) for prompt in prompts]
        created = journal.created(int(time.time()))
        if not wishes.stream:
            whole = CompletionExchange(serving, wishes, prompts, requests, model, created)
            return await answer(request, whole.completion())
        requests = journal.continued(requests, serving.model_digest, limits.vocab_size)
        writer = event_writer(request.headers, requests, created, serving.model_digest)
        exchange = CompletionExchange(serving, wishes, prompts, requests, model, created, journal, writer)
        return await event_stream(request, exchange.events(), is_resumable=writer.is_resumable)

    return router


def is_echo_only(wishes: CompletionRequest) -> bool:
    """Nothing but the prompt's own log probabilities is asked for; evaluation harnesses do that."""
    return bool(wishes.echo) and wishes.max_tokens == 0


@dataclass(frozen=True, slots=True)
class _Resolver:
    serving: Serving
    wishes: CompletionRequest
    limits: Limits
    request_id: str
    tenant: str

    def __call__(self, prompt: Prompt) -> GenerateRequest:
        sampling = sampling_params(
            self.wishes,
            max_tokens=self._max_tokens(),
            logprobs=self.wishes.logprobs,
            prompt_logprobs=self.wishes.logprobs if self.wishes.echo else None,
            num_prompt_tokens=len(prompt.token_ids),
            defaults=self.serving.defaults,
            limits=self.limits,
        )
        return GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            text=text_options(self.wishes),
            n=self.wishes.n or 1,
            priority=self.wishes.priority,
            tenant=self.tenant,
            cache_salt=self.wishes.cache_salt,
        )

    def _max_tokens(self) -> int | None:
        if is_echo_only(self.wishes):
            return 1  # made and dropped: the engine always makes a token
        if "max_tokens" in self.wishes.model_fields_set:
            return self.wishes.max_tokens
        return DEFAULT_MAX_TOKENS


@dataclass(frozen=True, slots=True)
class CompletionExchange:
    """One HTTP request under way; choice `i * n + j` is sequence j of prompt i."""

    serving: Serving
    wishes: CompletionRequest
    prompts: list[Prompt]
    requests: list[GenerateRequest]
    model: str
    created: int
    journal: Journal = BEGINS_HERE
    writer: EventWriter = WITHOUT_JOURNAL

    async def completion(self) -> Completion:
        with self.serving.engine.generate(self.requests) as generation:
            sequences = await collect(generation, self._num_choices)
        meter = self._meter()
        choices = []
        for sequence in map(self._shown, sequences):
            meter.count(sequence)
            choices.append(self._choice(sequence, self._formatter(), is_first=True, is_whole=True))
        return self._completion(choices, meter.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self.wishes.stream_options or StreamOptions()
        meter = self._meter()
        sequences = self.journal.sequences
        formatters = [self._formatter(sequences.get(index)) for index in range(self._num_choices)]
        begun = set(sequences)
        has_begun = self.journal.has_begun
        with self.serving.engine.generate(self.requests, sequences) as generation:
            async for deltas in generation:
                events = [] if has_begun else [self.writer.begin()]
                has_begun = True
                for delta in map(self._shown, deltas):
                    meter.count(delta)
                    event = b""
                    is_first = delta.index not in begun
                    if is_first or self._is_worth_sending(delta):
                        begun.add(delta.index)
                        choice = self._choice(delta, formatters[delta.index], is_first=is_first, is_whole=False)
                        event = to_event(self._completion([choice], self._chunk_usage(options, meter)))
                    events.append(self.writer.write(delta, event))
                if block := b"".join(events):
                    yield block
        if options.include_usage and not self.journal.has_usage:
            yield self.writer.write_usage(to_event(self._completion([], meter.usage())))
        yield DONE

    @property
    def _num_choices(self) -> int:
        return sum(request.n for request in self.requests)

    def _meter(self) -> UsageMeter:
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return UsageMeter(num_prompt_tokens, self.requests[0].n, self.journal.sequences.values())

    def _formatter(self, so_far: SequenceDelta | None = None) -> LogprobsFormatter:
        tokens_as_ids = bool(self.wishes.return_tokens_as_token_ids)
        formatter = LogprobsFormatter(self.serving.tokenizer, tokens_as_ids=tokens_as_ids)
        if so_far is not None:
            if self.wishes.echo:
                formatter.skip(self._prompt_of(so_far).token_ids)
            formatter.skip(so_far.token_ids)
        return formatter

    def _shown(self, delta: SequenceDelta) -> SequenceDelta:
        if not is_echo_only(self.wishes):
            return delta
        finish_reason = delta.finish_reason and "length"
        return dataclasses.replace(
            delta, text="", token_ids=[], logprobs=[], finish_reason=finish_reason, stop_reason=None
        )

    def _is_worth_sending(self, delta: SequenceDelta) -> bool:
        return bool(
            delta.text or delta.finish_reason or delta.logprobs or (delta.token_ids and self.wishes.return_token_ids)
        )

    def _choice(
        self, delta: SequenceDelta, formatter: LogprobsFormatter, *, is_first: bool, is_whole: bool
    ) -> CompletionChoice:
        """The first of a sequence brings the prompt, where that is asked for."""
        prompt = self._prompt_of(delta)
        echoes = is_first and bool(self.wishes.echo)
        return CompletionChoice(
            index=delta.index,
            text=self._text(prompt) + delta.text if echoes else delta.text,
            logprobs=self._logprobs(delta, formatter, prompt if echoes else None),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if is_whole or delta.stop_reason is not None else UNSET,
            token_ids=delta.token_ids if self.wishes.return_token_ids else UNSET,
            prompt_token_ids=prompt.token_ids if is_first and self.wishes.return_token_ids else UNSET,
        )

    def _prompt_of(self, delta: SequenceDelta) -> Prompt:
        return self.prompts[delta.index // self.requests[0].n]

    def _text(self, prompt: Prompt) -> str:
        return self.serving.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _logprobs(
        self, delta: SequenceDelta, formatter: LogprobsFormatter, prompt: Prompt | None
    ) -> CompletionLogprobs | None:
        if self.wishes.logprobs is None:
            return None
        token_ids, positions = list(delta.token_ids), list[TokenLogprobs | None](delta.logprobs)
        if prompt is not None:
            prompt_positions = delta.prompt_logprobs or [None] * len(prompt.token_ids)
            token_ids, positions = prompt.token_ids + token_ids, prompt_positions + positions
        return formatter.completion(token_ids, positions)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self.requests[0].request_id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _chunk_usage(self, options: StreamOptions, meter: UsageMeter) -> Usage | UnsetType | None:
        if options.continuous_usage_stats:
            return meter.usage()
        return None if options.include_usage else UNSET


def _request_schema() -> dict[str, object]:
    return {"content": {"application/json": {"schema": CompletionRequest.model_json_schema()}}}
