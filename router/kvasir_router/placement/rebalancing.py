"""Which running stream an overfull engine is to hand over, and to which engine: one at a time, or none.

An engine is overfull whose requests wait, or are preempted and wait again, because its KV is full, for some seconds. A
stream may go where KV stays half empty at its end, so that the receiver cannot become a source by what it is sent. It
must pay: the seconds for which the source is rid of its KV are many times those that the move takes. How long an output
gets is not known; as lengths have heavy tails, it is taken to get as many tokens again as it has. A preempted one
stays: it has no KV to free or to take along, and what is computed again for it holds up others wherever it goes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

SATURATED_USAGE = 0.9
STILL_SATURATED_USAGE = 0.7
"""While requests wait: one that is preempted leaves room for a moment, which the others fill again."""
RECEIVER_USAGE = 0.5
LEAST_REMAINING_TOKENS = 64
PREEMPTED_STEPS = 8
"""Of its engine, without a token for the stream: it was preempted. Stages of a pipeline draw one every few steps."""
HANDOVER_SECONDS = 0.05
"""Of the pause, beside the transfer: two requests, and the first step."""


@dataclass(frozen=True, slots=True)
class MoveCriteria:
    saturated_seconds: float = 3.0
    rest_seconds: float = 60.0
    """Between two handovers of one stream."""
    gain: float = 10.0
    """Least seconds won for each that the stream pauses."""


MOVE_CRITERIA = MoveCriteria()


@dataclass(frozen=True, slots=True)
class EngineView:
    url: str
    revision: str
    num_waiting: int
    kv_used_tokens: float  # what was sent there since its last word included
    kv_capacity_tokens: int
    steps_per_second: float
    saturated_seconds: float = 0.0  # since when `is_saturated` holds
    can_receive: bool = True  # it takes requests, and nothing is ahead of the next

    def usage_with(self, num_tokens: int) -> float:
        return (self.kv_used_tokens + num_tokens) / self.kv_capacity_tokens


@dataclass(frozen=True, slots=True)
class StreamView:
    """One that this router relays."""

    number: int
    url: str
    num_prompt_tokens: int
    num_drawn_tokens: int
    max_output_tokens: int | None = None  # None: no bound is known
    rested_seconds: float = inf  # since its last handover
    silent_seconds: float = 0.0  # since its last token

    @property
    def num_kv_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_drawn_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Expected."""
        if self.max_output_tokens is None:
            return self.num_drawn_tokens
        return min(self.num_drawn_tokens, self.max_output_tokens - self.num_drawn_tokens)


@dataclass(frozen=True, slots=True)
class Move:
    number: int  # of the stream
    source: str
    receiver: str


TransferSeconds = Callable[[str, str, int], float]
"""(source, receiver, tokens of KV)"""


def is_saturated(kv_used_tokens: int, kv_capacity_tokens: int, num_waiting: int, *, was_saturated: bool) -> bool:
    usage = STILL_SATURATED_USAGE if was_saturated else SATURATED_USAGE
    return num_waiting > 0 and kv_used_tokens >= usage * kv_capacity_tokens


def choose(
    engines: Sequence[EngineView],
    streams: Sequence[StreamView],
    transfer_seconds: TransferSeconds,
    criteria: MoveCriteria = MOVE_CRITERIA,
) -> Move | None:
    """From the engine with the most waiting, to the emptiest that the stream leaves half empty: the stream that frees
    the most KV for the longest. Ties go to the first.
    """
    sources = [engine for engine in engines if engine.saturated_seconds >= criteria.saturated_seconds]
    for source in sorted(sources, key=lambda engine: -engine.num_waiting):
        receivers = [engine for engine in engines if _may_receive(engine, source)]
        own = [stream for stream in streams if stream.url == source.url and _may_leave(stream, source, criteria)]
        for receiver in sorted(receivers, key=lambda engine: engine.usage_with(0)):
            worth = {stream: _worth(stream, source, receiver, transfer_seconds, criteria.gain) for stream in own}
            best = max(own, key=lambda stream: worth[stream], default=None)
            if best is not None and worth[best] > 0:
                return Move(best.number, source.url, receiver.url)
    return None


def _may_receive(engine: EngineView, source: EngineView) -> bool:
    is_other = engine.url != source.url and engine.revision == source.revision
    return is_other and engine.can_receive and not engine.num_waiting


def _may_leave(stream: StreamView, source: EngineView, criteria: MoveCriteria) -> bool:
    has_rested = stream.rested_seconds >= criteria.rest_seconds
    is_running = stream.silent_seconds * source.steps_per_second < PREEMPTED_STEPS
    return has_rested and is_running and stream.num_remaining_tokens >= LEAST_REMAINING_TOKENS


def _worth(
    stream: StreamView, source: EngineView, receiver: EngineView, transfer_seconds: TransferSeconds, gain: float
) -> float:
    """Token-seconds of KV that the source is rid of; 0.0: it does not fit, or does not pay."""
    if receiver.usage_with(stream.num_kv_tokens + stream.num_remaining_tokens) > RECEIVER_USAGE:
        return 0.0
    pause = HANDOVER_SECONDS + transfer_seconds(source.url, receiver.url, stream.num_kv_tokens)
    won = stream.num_remaining_tokens / source.steps_per_second if source.steps_per_second else 0.0
    return stream.num_kv_tokens * won if won >= gain * pause else 0.0
