"""What OpenAI's two generating routes have in common: log-probabilities, usage, and how streams end."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import KvasirRuntimeError
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.server.errors import status_and_body
from kvasir_runtime.server.exchange import UsageMeter
from kvasir_runtime.server.prompts import Prompt
from kvasir_runtime.server.protocol import GenerationFields, StreamOptions
from kvasir_runtime.server.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
    Usage,
)
from kvasir_runtime.server.serving import Heading
from kvasir_runtime.transfer.params import KvTransferParams

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say (vLLM's number)."""
_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
ChunkUsage = Usage | UnsetType | None
Wishes = TypeVar("Wishes", bound=GenerationFields)


class OpenAiShape(Generic[Wishes]):
    """What both do alike of a `Shape`."""

    def __init__(self, tokenizer: Tokenizer, wishes: Wishes, prompts: Sequence[Prompt], heading: Heading) -> None:
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

    def formatter(self) -> "LogprobsFormatter":
        return LogprobsFormatter(self.tokenizer, tokens_as_ids=bool(self.wishes.return_tokens_as_token_ids))


def to_event(value: Any) -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2)."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def transfer_params_of(sequences: Sequence[SequenceDelta]) -> KvTransferParams | UnsetType:
    """Of an answer, or of a piece of it."""
    return next((each.kv_transfer_params for each in sequences if each.kv_transfer_params is not None), UNSET)


class LogprobsFormatter:
    """Of one sequence; it counts the text's offset from delta to delta."""

    def __init__(self, tokenizer: Tokenizer, *, tokens_as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids
        self._offset = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """Counts tokens that were shown by another server."""
        self._offset += sum(len(self._token(token_id)) for token_id in token_ids)

    def chat(self, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_position(position) for position in positions])

    def completion(self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """`None` at a position (a prompt's first token) has no probability."""
        shaped = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            token = self._token(token_id)
            shaped.text_offset.append(self._offset)
            shaped.tokens.append(token)
            shaped.token_logprobs.append(None if position is None else _finite(position.logprobs[0]))
            shaped.top_logprobs.append(None if position is None else self._by_token(position))
            self._offset += len(token)
        return shaped

    def _chat_position(self, position: TokenLogprobs) -> ChatTokenLogprob:
        chosen, *top = (self._top(*entry) for entry in zip(position.token_ids, position.logprobs, strict=True))
        return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(self._token(token_id), _finite(logprob), list(self._tokenizer.token_bytes(token_id)))

    def _by_token(self, position: TokenLogprobs) -> dict[str, float]:
        by_token: dict[str, float] = {}
        for token_id, logprob in zip(position.token_ids, position.logprobs, strict=True):
            by_token.setdefault(self._token(token_id), _finite(logprob))
        return by_token

    def _token(self, token_id: int) -> str:
        if self._tokens_as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
