"""OpenAI's two generating routes, whole or as a stream: POST /v1/chat/completions, from messages to an assistant's
answer, and POST /v1/completions, from text or token ids to what follows them.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvasir_runtime.engine.detokenizer import TokenText
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import InvalidRequestError, KvasirRuntimeError
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.server.answer_formats import AnswerFormats
from kvasir_runtime.server.errors import error_response, status_and_body
from kvasir_runtime.server.exchange import UsageMeter
from kvasir_runtime.server.prompts import Prompt, PromptBuilder
from kvasir_runtime.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields, StreamOptions
from kvasir_runtime.server.reading import AnswerReader, Reading, reading_of
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
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    FunctionDelta,
    PromptLogprob,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
    to_json,
    to_part,
)
from kvasir_runtime.server.serving import Heading, Route, as_given
from kvasir_runtime.talk.events import Arguments, CallBegun, Content, Event, Reasoning
from kvasir_runtime.transfer.params import KvTransferParams

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say (vLLM's number)."""
_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
ChunkUsage = Usage | UnsetType | None
Wishes = TypeVar("Wishes", bound=GenerationFields)


class OpenAiShape(Generic[Wishes]):
    """What both do alike of a `Shape`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        wishes: Wishes,
        prompts: Sequence[Prompt],
        heading: Heading,
        reading: Reading | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.wishes = wishes
        self.prompts = prompts
        self.heading = heading
        self.stream_options = wishes.stream_options or StreamOptions()

    def skip(self, sequence: SequenceDelta) -> None:
        """Events do not depend on those before them."""

    def shown(self, delta: SequenceDelta) -> SequenceDelta:
        return delta

    def end(self) -> bytes:
        return DONE

    def error_event(self, error: KvasirRuntimeError) -> bytes:
        return to_event(status_and_body(error)[1]) + DONE

    def is_worth_sending(self, delta: SequenceDelta) -> bool:
        """Half a character or the beginning of a stop string shows nothing yet."""
        return bool(
            delta.text or delta.finish_reason or delta.logprobs or (delta.token_ids and self.wishes.return_token_ids)
        )

    def chunk_usage(self, meter: UsageMeter) -> ChunkUsage:
        if self.stream_options.continuous_usage_stats:
            return meter.usage()
        return None if self.stream_options.include_usage else UNSET

    def prompt_logprobs_of(self, sequence: SequenceDelta) -> PromptLogprobs | UnsetType:
        most = self.wishes.prompt_logprobs
        return UNSET if most is None else self.formatter().prompt(sequence.prompt_logprobs or [None], most)

    def formatter(self) -> "LogprobsFormatter":
        return LogprobsFormatter(self.tokenizer, tokens_as_ids=bool(self.wishes.return_tokens_as_token_ids))


def to_event(value: Any) -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2)."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def transfer_params_of(sequences: Sequence[SequenceDelta]) -> KvTransferParams | UnsetType:
    return next((each.kv_transfer_params for each in sequences if each.kv_transfer_params is not None), UNSET)


class LogprobsFormatter:
    def __init__(self, tokenizer: Tokenizer, *, tokens_as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids

    def chat(self, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_position(position) for position in positions])

    def completion(
        self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> CompletionLogprobs:
        """`None` at a position (a prompt's first token) has no probability."""
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if position is None else _finite(position.logprobs[0]) for position in positions],
            tokens=[self._spelling(token_id) for token_id in token_ids],
            top_logprobs=[None if position is None else self._by_spelling(position) for position in positions],
        )

    def prompt(self, positions: Sequence[TokenLogprobs | None], most: int) -> PromptLogprobs:
        """With the `most` likely of each."""
        return [None if position is None else self._prompt_position(position, most) for position in positions]

    def _prompt_position(self, position: TokenLogprobs, most: int) -> dict[int, PromptLogprob]:
        by_id: dict[int, PromptLogprob] = {}
        for rank, (token_id, logprob) in enumerate(zip(position.token_ids, position.logprobs, strict=True)):
            if rank <= most and token_id not in by_id:
                token = self._tokenizer.token_bytes(token_id).decode(errors="replace")
                by_id[token_id] = PromptLogprob(_finite(logprob), rank or position.rank, token)
        return by_id

    def _chat_position(self, position: TokenLogprobs) -> ChatTokenLogprob:
        chosen, *top = (self._top(*entry) for entry in zip(position.token_ids, position.logprobs, strict=True))
        return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        token_bytes = self._tokenizer.token_bytes(token_id)
        token = _id_spelling(token_id) if self._tokens_as_ids else token_bytes.decode(errors="replace")
        return TopLogprob(token, _finite(logprob), list(token_bytes))

    def _by_spelling(self, position: TokenLogprobs) -> dict[str, float]:
        """An entry a token: of two with one spelling the likelier has it, which comes first, as the chosen one does."""
        by_id = dict(zip(position.token_ids, position.logprobs, strict=True))
        by_spelling: dict[str, float] = {}
        for token_id, logprob in by_id.items():
            spelling = self._spelling(token_id)
            by_spelling[_id_spelling(token_id) if spelling in by_spelling else spelling] = _finite(logprob)
        return by_spelling

    def _spelling(self, token_id: int) -> str:
        """Of a part of a character its bytes, as OpenAI spells them."""
        if self._tokens_as_ids:
            return _id_spelling(token_id)
        token_bytes = self._tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _id_spelling(token_id: int) -> str:
    return f"token_id:{token_id}"


def prompt_offsets(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Where a prompt's tokens begin in its text. A special token counts where the text has it: the tokenizer may have
    added it.
    """
    tokens = TokenText(tokenizer, skip_special_tokens=False)
    offsets, at = [], 0
    for token_id in prompt.token_ids:
        offsets.append(min(at, len(prompt.text)))
        if token_id not in tokenizer.special_ids or prompt.text.startswith(tokenizer.token(token_id), at):
            at += len(tokens.feed(token_id))
    return offsets


class TextOffsets:
    """Where the tokens of one sequence begin in its text, from delta to delta. A token without text of its own, which
    is hidden or a part of a character, begins where the next text does, and none begins behind the text's end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, *, echoes: bool, skip_special_tokens: bool) -> None:
        self._at = self._num_chars = len(prompt.text) if echoes else 0
        self._text = TokenText(tokenizer, skip_special_tokens=skip_special_tokens, context=prompt.token_ids)

    def of_delta(self, delta: SequenceDelta) -> list[int]:
        offsets = []
        for token_id in delta.token_ids:
            offsets.append(self._at)
            self._at += len(self._text.feed(token_id))
        self._num_chars += len(delta.text)
        return offsets if delta.finish_reason is None else [min(offset, self._num_chars) for offset in offsets]


def _shortened(position: TokenLogprobs | None, most: int) -> TokenLogprobs | None:
    """With so many alternatives, where more were asked for of the prompt alone."""
    if position is None or len(position.token_ids) <= 1 + most:
        return position
    return TokenLogprobs(position.token_ids[: 1 + most], position.logprobs[: 1 + most], position.rank)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


async def chat_prompts(builder: PromptBuilder, chat: ChatCompletionRequest, limits: Limits) -> list[Prompt]:
    prompts = [await builder.chat_prompt(chat, limits, most_prompt_tokens(chat, limits.max_model_len))]
    _check_scored(chat, prompts, 1)
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

    def __init__(
        self,
        tokenizer: Tokenizer,
        wishes: ChatCompletionRequest,
        prompts: Sequence[Prompt],
        heading: Heading,
        reading: Reading | None = None,
    ) -> None:
        super().__init__(tokenizer, wishes, prompts, heading, reading)
        self._reader = None if reading is None else AnswerReader(reading, heading.id, heading.created)

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


CHAT = Route(
    path="/v1/chat/completions",
    id_prefix="chatcmpl",
    body=ChatCompletionRequest,
    wishes=as_given,
    prompts=chat_prompts,
    reading=chat_reading,
    shape=ChatShape,
    refusal=error_response,
)


MAX_ECHOED = 2**22
"""Of a request: tokens of its prompts, times the sequences that repeat them, times the log-probabilities of each.
Shaping so many takes 4 s of a processor, and their JSON 70 MB."""


async def _completion_prompts(builder: PromptBuilder, wishes: CompletionRequest, limits: Limits) -> list[Prompt]:
    prompts = await builder.completion_prompts(wishes, limits)
    _check_echo(wishes, prompts)
    _check_scored(wishes, prompts, wishes.num_returned)
    return prompts


def _check_scored(wishes: GenerationFields, prompts: Sequence[Prompt], num_times: int) -> None:
    """`num_times`: that an answer has each prompt's log-probabilities."""
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if wishes.prompt_logprobs is not None and num_tokens * num_times * (1 + wishes.prompt_logprobs) > MAX_ECHOED:
        raise InvalidRequestError(
            f"prompt_logprobs: {num_tokens} tokens of prompts times {num_times} choices times "
            f"{1 + wishes.prompt_logprobs} log-probabilities are more than the {MAX_ECHOED} that an answer has; "
            "ask for fewer, or send several requests",
            "prompt_logprobs",
        )


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

    def __init__(
        self,
        tokenizer: Tokenizer,
        wishes: CompletionRequest,
        prompts: Sequence[Prompt],
        heading: Heading,
        reading: Reading | None = None,
    ) -> None:
        super().__init__(tokenizer, wishes, prompts, heading, reading)
        self._offsets: dict[int, TextOffsets] = {}
        self._prompt_offsets = cache(lambda number: prompt_offsets(tokenizer, prompts[number]))
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
        transfer_params = UNSET if delta.kv_transfer_params is None else delta.kv_transfer_params
        return to_event(self._completion([choice], self.chunk_usage(meter), transfer_params))

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
            prompt_positions = [_shortened(position, self.wishes.logprobs) for position in scored]
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
    id_prefix="cmpl",
    body=CompletionRequest,
    wishes=as_given,
    prompts=_completion_prompts,
    shape=CompletionShape,
    refusal=error_response,
)
