"""What steps bring for sequences."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvasir_runtime.transfer.params import KvTransferParams

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position: the chosen token first, then the most likely ones in falling order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Of the chosen token, counted from 1."""


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought for one sequence, when it is more than tokens (`PlainTokens`)."""

    request_id: str
    index: int = 0
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token (the first is None), sent once, with or before the first new token."""
    pooled: bytes | None = None
    """The vector of a request that wanted one, little-endian float32; with its end."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first scheduled, but those that came from another
    engine for it."""
    admitted_at: float | None = None
    """With a request's first token: when it was first scheduled, by the machine's monotonic clock."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token id that ended the sequence, if one did; it is the last of `new_token_ids`."""
    error: str | None = None
    """Says why, with finish_reason `error`."""
    is_too_large: bool = False
    """With an error: the engine cannot hold what was asked for, whenever it is asked."""
    kv_transfer_params: KvTransferParams | None = None
    """With the end of a request whose blocks are kept: what the engine that wants them is to be asked with."""


class PlainTokens(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of sequences that go on and have nothing else to tell: most of all outputs, so told in columns, which
    cost a step of hundreds of sequences less than a struct for each."""

    request_ids: list[str]
    indices: list[int]
    num_tokens: list[int]
    """How many of `token_ids`, in order, belong to each sequence."""
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class AddressedOutput:
    """An output and the API process that it goes to."""

    api_index: int
    output: SequenceOutput


@dataclass(slots=True)
class Outcome:
    """What one step brought for all clients."""

    outputs: list[AddressedOutput] = field(default_factory=list)
    plain: dict[int, PlainTokens] = field(default_factory=dict)
    """API process -> tokens of its sequences that go on and have nothing else to tell."""
