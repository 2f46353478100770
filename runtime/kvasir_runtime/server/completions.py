"""POST /v1/completions: prompts as text or token ids, continued; whole or as a stream."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from kvasir_runtime.engine.async_engine import GenerateRequest
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.server.body import read_body
from kvasir_runtime.server.exchange import ChunkUsage, Exchange
from kvasir_runtime.server.journal import Journal, body_limit, event_writer, split_body
from kvasir_runtime.server.kv_transfer import shown, transfer_params
from kvasir_runtime.server.logprobs import LogprobsFormatter
from kvasir_runtime.server.parsing import parse
from kvasir_runtime.server.prompts import Prompt
from kvasir_runtime.server.protocol import CompletionRequest, StreamOptions
from kvasir_runtime.server.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
    to_event,
    to_json,
    to_part,
)
from kvasir_runtime.server.sampling import Limits, beam_search, sampling_params, text_options
from kvasir_runtime.server.serving import Serving, http_request_id_of, new_request_id, tenant_of
from kvasir_runtime.server.streaming import answer, event_stream
from kvasir_runtime.transfer.params import KvTransferParams

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for this route."""
MAX_ECHOED = 2**22
"""Of a request: tokens of its prompts, times the sequences that repeat them, times the log-probabilities of each.
Shaping so many takes 4 s of a processor, and their JSON 70 MB."""


def completion_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra={"requestBody": _request_schema()})
    async def create_completion(request: Request) -> Response:
        max_bytes = body_limit(serving.max_body_bytes, request.headers)
        body, journal = split_body(await read_body(request, max_bytes, serving.max_body_seconds), request.headers)
        wishes = parse(CompletionRequest, body)
        model = serving.check_model(wishes.model)
        limits = serving.limits()
        prompts = await serving.prompts.completion_prompts(wishes, limits)
        transfer = transfer_params(request, wishes, serving.kv_transfer, len(prompts))
        resolve = _Resolver(serving, wishes, limits, new_request_id("cmpl"), tenant_of(request), transfer)
        resolved = [resolve(prompt) for prompt in prompts]
        _check_echo(wishes, prompts)
        created = journal.created(int(time.time()))
        requests = journal.continued(
            resolved,
            serving.model_digest,
            limits.vocab_size,
            is_stream=bool(wishes.stream),
            kv_transfer=serving.kv_transfer,
        )
        writer = event_writer(request.headers, requests, created, serving.model_digest, journal)
        exchange = Exchange(
            engine=serving.engine,
            admission=serving.admission,
            requests=requests,
            shape=CompletionShape(serving, wishes, prompts, requests[0].request_id, model, created, journal),
            shapers=serving.shapers,
            num_returned=wishes.num_returned,
            stream_options=wishes.stream_options or StreamOptions(),
            journal=journal,
            writer=writer,
            http_request_id=http_request_id_of(request),
        )
        if not wishes.stream:
            return await answer(request, exchange.whole())
        return await event_stream(request, exchange.events(), is_resumable=writer.is_resumable)

    return router


def is_echo_only(wishes: CompletionRequest) -> bool:
    """Nothing but the prompt's own log probabilities is asked for; evaluation harnesses do that."""
    return bool(wishes.echo) and wishes.token_limit == 0


def _check_echo(wishes: CompletionRequest, prompts: Sequence[Prompt]) -> None:
    """Each sequence repeats its prompt, although that is read and scored once."""
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    num_each = 1 if wishes.logprobs is None else 1 + wishes.logprobs
    if wishes.echo and num_tokens * wishes.num_returned * num_each > MAX_ECHOED:
        raise InvalidRequestError(
            f"echo: {num_tokens} tokens of prompts times {wishes.num_returned} sequences times {num_each} "
            f"log-probabilities are more than the {MAX_ECHOED} that an answer repeats; ask for fewer sequences or "
            "logprobs, or send several requests",
            "echo",
        )


@dataclass(frozen=True, slots=True)
class _Resolver:
    serving: Serving
    wishes: CompletionRequest
    limits: Limits
    request_id: str
    tenant: str
    kv_transfer_params: KvTransferParams | None

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
            spec=RequestSpec(
                prompt_token_ids=prompt.token_ids,
                sampling=sampling,
                beam=beam_search(self.wishes),
                priority=self.wishes.priority,
                tenant=self.tenant,
                cache_salt=self.wishes.cache_salt,
                kv_transfer_params=self.kv_transfer_params,
            ),
            text=text_options(self.wishes),
            n=self.wishes.num_sequences,
        )

    def _max_tokens(self) -> int | None:
        if is_echo_only(self.wishes):
            return 1  # made and dropped: the engine always makes a token
        if self.wishes.token_limit is None and "max_tokens" not in self.wishes.model_fields_set:
            return DEFAULT_MAX_TOKENS
        return self.wishes.token_limit


class CompletionShape:
    """Text completions; choice `i * n + j` is sequence j of prompt i, and its first event brings what is echoed."""

    def __init__(
        self,
        serving: Serving,
        wishes: CompletionRequest,
        prompts: Sequence[Prompt],
        request_id: str,
        model: str,
        created: int,
        journal: Journal,
    ) -> None:
        self._tokenizer = serving.tokenizer
        self._wishes = wishes
        self._prompts = prompts
        self._request_id = request_id
        self._model = model
        self._created = created
        self._formatters = [self._formatter() for _ in range(len(prompts) * wishes.num_returned)]
        if wishes.logprobs is not None:
            for index, sequence in journal.sequences.items():
                self._skip(index, sequence.token_ids)
        self._begun = set(journal.sequences)

    def shown(self, delta: SequenceDelta) -> SequenceDelta:
        if not is_echo_only(self._wishes):
            return delta
        finish_reason = delta.finish_reason and "length"
        return msgspec.structs.replace(
            delta, text="", token_ids=[], logprobs=[], finish_reason=finish_reason, stop_reason=None
        )

    def whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes:
        choices = [to_part(self._choice(sequence, is_first=True, is_whole=True)) for sequence in sequences]
        return to_json(self._completion(choices, usage, shown(sequences)))

    def first_event(self, usage: ChunkUsage) -> bytes:
        return b""

    def event(self, delta: SequenceDelta, usage: ChunkUsage) -> bytes:
        is_first = delta.index not in self._begun
        if not (is_first or self._is_worth_sending(delta)):
            return b""
        self._begun.add(delta.index)
        choice = self._choice(delta, is_first=is_first, is_whole=False)
        return to_event(self._completion([choice], usage, shown([delta])))

    def usage_event(self, usage: Usage) -> bytes:
        return to_event(self._completion([], usage))

    def _formatter(self) -> LogprobsFormatter:
        return LogprobsFormatter(self._tokenizer, tokens_as_ids=bool(self._wishes.return_tokens_as_token_ids))

    def _skip(self, index: int, token_ids: Sequence[int]) -> None:
        """What another server has shown of a sequence."""
        if self._wishes.echo:
            self._formatters[index].skip(self._prompt_of(index).token_ids)
        self._formatters[index].skip(token_ids)

    def _is_worth_sending(self, delta: SequenceDelta) -> bool:
        return bool(
            delta.text or delta.finish_reason or delta.logprobs or (delta.token_ids and self._wishes.return_token_ids)
        )

    def _choice(self, delta: SequenceDelta, *, is_first: bool, is_whole: bool) -> CompletionChoice:
        """The first of a sequence brings the prompt, where that is asked for."""
        prompt = self._prompt_of(delta.index)
        echoes = is_first and bool(self._wishes.echo)
        return CompletionChoice(
            index=delta.index,
            text=prompt.text + delta.text if echoes else delta.text,
            logprobs=self._logprobs(delta, prompt if echoes else None),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if is_whole or delta.stop_reason is not None else UNSET,
            token_ids=delta.token_ids if self._wishes.return_token_ids else UNSET,
            prompt_token_ids=prompt.token_ids if is_first and self._wishes.return_token_ids else UNSET,
        )

    def _prompt_of(self, index: int) -> Prompt:
        return self._prompts[index // self._wishes.num_returned]

    def _logprobs(self, delta: SequenceDelta, prompt: Prompt | None) -> CompletionLogprobs | None:
        if self._wishes.logprobs is None:
            return None
        token_ids, positions = list(delta.token_ids), list[TokenLogprobs | None](delta.logprobs)
        if prompt is not None:
            prompt_positions = delta.prompt_logprobs or [None] * len(prompt.token_ids)
            token_ids, positions = prompt.token_ids + token_ids, prompt_positions + positions
        return self._formatters[delta.index].completion(token_ids, positions)

    def _completion(
        self,
        choices: list[CompletionChoice] | list[msgspec.Raw],
        usage: ChunkUsage,
        kv_transfer_params: KvTransferParams | UnsetType = UNSET,
    ) -> Completion:
        return Completion(
            id=self._request_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            kv_transfer_params=kv_transfer_params,
        )


def _request_schema() -> dict[str, object]:
    return {"content": {"application/json": {"schema": CompletionRequest.model_json_schema()}}}
