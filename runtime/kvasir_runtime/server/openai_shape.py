"""What the answers of OpenAI's two generating routes have in common."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.errors import KvasirRuntimeError
from kvasir_runtime.server.errors import status_and_body
from kvasir_runtime.server.exchange import UsageMeter
from kvasir_runtime.server.logprobs import LogprobsFormatter
from kvasir_runtime.server.protocol import GenerationFields, StreamOptions
from kvasir_runtime.server.responses import PromptLogprobs, Usage
from kvasir_runtime.server.serving import Prepared
from kvasir_runtime.transfer.params import KvTransferParams

_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
ChunkUsage = Usage | UnsetType | None
Wishes = TypeVar("Wishes", bound=GenerationFields)


class OpenAiShape(Generic[Wishes]):
    """What both do alike of a `Shape`."""

    def __init__(self, prepared: Prepared[Wishes]) -> None:
        self.tokenizer = prepared.tokenizer
        self.wishes = prepared.wishes
        self.prompts = prepared.prompts
        self.heading = prepared.heading
        self.stream_options = self.wishes.stream_options or StreamOptions()

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

    def formatter(self) -> LogprobsFormatter:
        return LogprobsFormatter(self.tokenizer, tokens_as_ids=bool(self.wishes.return_tokens_as_token_ids))


def to_event(value: Any) -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2)."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def transfer_params_of(sequences: Sequence[SequenceDelta]) -> KvTransferParams | UnsetType:
    """Of an answer, or of a piece of it."""
    return next((each.kv_transfer_params for each in sequences if each.kv_transfer_params is not None), UNSET)
