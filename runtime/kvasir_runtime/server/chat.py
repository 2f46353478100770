"""POST /v1/chat/completions: messages to an assistant's answer, whole or as a stream."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.server.errors import error_response
from kvasir_runtime.server.exchange import UsageMeter
from kvasir_runtime.server.openai import ChunkUsage, OpenAiShape, to_event, transfer_params_of
from kvasir_runtime.server.prompts import Prompt, PromptBuilder
from kvasir_runtime.server.protocol import ChatCompletionRequest
from kvasir_runtime.server.resolving import Limits
from kvasir_runtime.server.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
    to_json,
    to_part,
)
from kvasir_runtime.server.serving import Route


async def _prompts(builder: PromptBuilder, chat: ChatCompletionRequest, limits: Limits) -> list[Prompt]:
    return [Prompt(await builder.chat_prompt(chat, limits), "")]


class ChatShape(OpenAiShape[ChatCompletionRequest]):
    """The first event names the role, the others bring text."""

    def whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes:
        completion = ChatCompletion(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            choices=[to_part(self._choice(sequence)) for sequence in sequences],
            usage=usage,
            prompt_token_ids=self._prompt_token_ids(),
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
        if not self.is_worth_sending(delta):
            return b""
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.stop_reason is None else delta.stop_reason,
            token_ids=delta.token_ids if self.wishes.return_token_ids else UNSET,
        )
        chunk = self._chunk([choice], self.chunk_usage(meter))
        chunk.kv_transfer_params = transfer_params_of([delta])
        return to_event(chunk)

    def usage_event(self, usage: Usage) -> bytes:
        return to_event(self._chunk([], usage)) if self.stream_options.include_usage else b""

    def _choice(self, sequence: SequenceDelta) -> ChatChoice:
        return ChatChoice(
            index=sequence.index,
            message=ChatAnswer("assistant", sequence.text),
            logprobs=self._logprobs(sequence),
            finish_reason=sequence.finish_reason or "abort",
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


CHAT = Route(
    path="/v1/chat/completions",
    id_prefix="chatcmpl",
    wishes=ChatCompletionRequest,
    prompts=_prompts,
    shape=ChatShape,
    refusal=error_response,
)
