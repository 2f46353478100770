"""OpenAI's POST /v1/completions, whole or as a stream: from texts or token ids to what follows them."""

from collections.abc import Sequence
from functools import cache

import msgspec
from msgspec import UNSET, UnsetType

from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.server.errors import error_response
from kvasir_runtime.server.exchange import UsageMeter
from kvasir_runtime.server.logprobs import MAX_ECHOED, TextOffsets, check_scored, prompt_offsets, shortened
from kvasir_runtime.server.openai_shape import ChunkUsage, OpenAiShape, to_event, transfer_params_of
from kvasir_runtime.server.prompts import Prompt, PromptBuilder
from kvasir_runtime.server.protocol import CompletionRequest
from kvasir_runtime.server.resolving import Limits
from kvasir_runtime.server.responses import Completion, CompletionChoice, CompletionLogprobs, Usage, to_json, to_part
from kvasir_runtime.server.serving import Prepared, Route, as_given
from kvasir_runtime.transfer.params import KvTransferParams


async def _completion_prompts(builder: PromptBuilder, wishes: CompletionRequest, limits: Limits) -> list[Prompt]:
    prompts = await builder.completion_prompts(wishes, limits)
    _check_echo(wishes, prompts)
    if wishes.prompt_logprobs is not None:
        check_scored(prompts, wishes.num_returned, wishes.prompt_logprobs)
    return prompts


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


class CompletionShape(OpenAiShape[CompletionRequest]):
    """Choice `i * n + j` is sequence j of prompt i, and its first event brings what is echoed."""

    def __init__(self, prepared: Prepared[CompletionRequest]) -> None:
        super().__init__(prepared)
        self._offsets: dict[int, TextOffsets] = {}
        self._prompt_offsets = cache(lambda number: prompt_offsets(self.tokenizer, self.prompts[number]))
        self._begun: set[int] = set()

    def skip(self, sequence: SequenceDelta) -> None:
        self._begun.add(sequence.index)
        if self.wishes.logprobs is not None:
            self._offsets_of(sequence.index).of_delta(sequence)

    def shown(self, delta: SequenceDelta) -> SequenceDelta:
        if not self.wishes.is_echo_only:
            return delta
        finish_reason = delta.finish_reason and "length"
        return msgspec.structs.replace(
            delta, text="", token_ids=[], logprobs=[], finish_reason=finish_reason, stop_reason=None
        )

    def whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes:
        choices = [to_part(self._choice(sequence, is_first=True, is_whole=True)) for sequence in sequences]
        return to_json(self._completion(choices, usage, transfer_params_of(sequences)))

    def first_event(self, meter: UsageMeter) -> bytes:
        return b""

    def event(self, delta: SequenceDelta, meter: UsageMeter) -> bytes:
        is_first = delta.index not in self._begun
        if not (is_first or self.is_worth_sending(delta)):
            return b""
        self._begun.add(delta.index)
        choice = self._choice(delta, is_first=is_first, is_whole=False)
        return to_event(self._completion([choice], self.chunk_usage(meter), transfer_params_of([delta])))

    def usage_event(self, usage: Usage) -> bytes:
        return to_event(self._completion([], usage)) if self.stream_options.include_usage else b""

    def _choice(self, delta: SequenceDelta, *, is_first: bool, is_whole: bool) -> CompletionChoice:
        """The first of a sequence brings the prompt, where that is asked for."""
        prompt = self._prompt_of(delta.index)
        echoes = is_first and bool(self.wishes.echo)
        return CompletionChoice(
            index=delta.index,
            text=prompt.text + delta.text if echoes else delta.text,
            logprobs=self._logprobs(delta, prompt if echoes else None),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if is_whole or delta.stop_reason is not None else UNSET,
            token_ids=delta.token_ids if self.wishes.return_token_ids else UNSET,
            prompt_token_ids=prompt.token_ids if is_first and self.wishes.return_token_ids else UNSET,
            prompt_logprobs=self.prompt_logprobs_of(delta),
        )

    def _prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.wishes.num_returned]

    def _logprobs(self, delta: SequenceDelta, prompt: Prompt | None) -> CompletionLogprobs | None:
        if self.wishes.logprobs is None:
            return None
        token_ids, positions = list(delta.token_ids), list[TokenLogprobs | None](delta.logprobs)
        offsets = self._offsets_of(delta.index).of_delta(delta)
        if prompt is not None:
            scored = delta.prompt_logprobs or [None] * len(prompt.token_ids)
            prompt_positions = [shortened(position, self.wishes.logprobs) for position in scored]
            token_ids, positions = prompt.token_ids + token_ids, prompt_positions + positions
            offsets = self._prompt_offsets(delta.index // self.wishes.num_returned) + offsets
        return self.formatter().completion(token_ids, positions, offsets)

    def _offsets_of(self, index: int) -> TextOffsets:
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(
                self.tokenizer,
                self._prompt_of(index),
                echoes=bool(self.wishes.echo),
                skip_special_tokens=self.wishes.skip_special_tokens,
            )
        return self._offsets[index]

    def _completion(
        self,
        choices: list[CompletionChoice] | list[msgspec.Raw],
        usage: ChunkUsage,
        kv_transfer_params: KvTransferParams | UnsetType = UNSET,
    ) -> Completion:
        return Completion(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            choices=choices,
            usage=usage,
            kv_transfer_params=kv_transfer_params,
        )


COMPLETIONS = Route(
    path="/v1/completions",
    id_prefix="cmpl-",
    body=CompletionRequest,
    wishes=as_given,
    prompts=_completion_prompts,
    shape=CompletionShape,
    refusal=error_response,
)
