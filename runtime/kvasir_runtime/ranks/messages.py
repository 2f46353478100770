"""What the engine core and its ranks say to each other. No pickles: ranks of other nodes are reached over the network.

A rank takes what it is sent strictly in order, and all ranks are sent the same.
"""

from typing import Any

import msgspec
import numpy as np

from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.parallel.counts import CountsByGroup
from kvasir_runtime.scheduling.step import StepPlan, StepResult


class Forward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    plan: StepPlan


class Sample(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of the step that went forward last."""


class WorkInIdleTime(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One piece of what steps can do without."""


class ReleaseKv(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give the KV cache's memory back."""


class RestoreKv(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take it again."""


class PrepareGrammar(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make what follows it, beside the steps."""

    number: int
    grammar: str


class GrammarPrepared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One rank has, or could not."""

    number: int


class RankCame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Its process has found the core, and goes on to meet the other ranks."""

    rank: int


class RankProgress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A sign of life."""

    rank: int
    num_steps: int
    """Finished by the rank's thread; on CUDA, launched."""
    num_calls: int
    """Collectives begun since the last step began."""
    counts: CountsByGroup


class RankReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    rank: int
    description: RankDescription


class StepDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of the oldest step that no result has come of."""

    result: StepResult


class StepFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of the same; the ranks still agree, and go on."""

    error: str


class IdleWorkDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    has_more: bool


class RankFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank's last word."""

    rank: int
    error: str
    is_consequence: bool
    """Whether it only heard of another's end, in the middle of a collective."""


ToRank = Forward | Sample | PrepareGrammar | WorkInIdleTime | ReleaseKv | RestoreKv
FromRank = RankCame | RankProgress | RankReady | StepDone | StepFailed | GrammarPrepared | IdleWorkDone | RankFailed


def encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_encode)


def to_rank_decoder() -> msgspec.msgpack.Decoder[ToRank]:
    return msgspec.msgpack.Decoder(ToRank, dec_hook=_decode)


def from_rank_decoder() -> msgspec.msgpack.Decoder[FromRank]:
    return msgspec.msgpack.Decoder(FromRank, dec_hook=_decode)


def _encode(value: Any) -> Any:
    """Arrays as (type, shape, bytes), and numbers that are numpy's as Python's."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} cannot be sent to a rank")


def _decode(kind: Any, value: Any) -> Any:
    dtype, shape, content = value
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)  # a bytearray, so that it can be written
