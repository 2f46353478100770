"""One request of a client under way, whole or as a stream: generate, count, shape, write.

What differs between the routes is a `Shape`: how deltas become their JSON.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from kvasir_runtime.engine.async_engine import AsyncEngine, GenerateRequest
from kvasir_runtime.engine.generation import Generation, SequenceDelta
from kvasir_runtime.errors import RequestMovedError
from kvasir_runtime.server.admission import Admission
from kvasir_runtime.server.journal import BEGINS_HERE, WITHOUT_JOURNAL, EventWriter, Journal
from kvasir_runtime.server.protocol import StreamOptions
from kvasir_runtime.server.responses import DONE, PromptTokensDetails, Usage
from kvasir_runtime.transfer.params import KvTransferParams

ChunkUsage = Usage | UnsetType | None
INLINE_LOGPROBS = 2048
"""Fewer are shaped on the event loop: 5 ms."""


class Shape(Protocol):
    """An answer as one route gives it, as JSON, which may be made in a thread; an event is empty where there is nothing
    to show."""

    def shown(self, delta: SequenceDelta) -> SequenceDelta:
        """What the client is to see, and pay for, of a delta."""

    def whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes: ...

    def first_event(self, usage: ChunkUsage) -> bytes:
        """What precedes all sequences."""

    def event(self, delta: SequenceDelta, usage: ChunkUsage) -> bytes: ...

    def usage_event(self, usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    engine: AsyncEngine
    admission: Admission
    requests: Sequence[GenerateRequest]
    """One a prompt, all of the same number of sequences."""
    shape: Shape
    shapers: Executor
    """For answers that the event loop would not get done with soon."""
    num_returned: int
    """Sequences a prompt that the client gets, the best of those that are generated."""
    stream_options: StreamOptions
    journal: Journal = BEGINS_HERE
    writer: EventWriter = WITHOUT_JOURNAL
    http_request_id: str | None = None

    async def whole(self) -> bytes:
        meter = self._meter()
        with self._generation() as generation:
            sequences = [self.shape.shown(sequence) for sequence in await generation.whole()]
        for sequence in sequences:
            meter.count(sequence)
        return await self._shaped(sequences, partial(self._whole, sequences, meter.usage()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        meter = self._meter()
        has_begun = self.journal.has_begun
        with self._generation() as generation:
            try:
                async for deltas in generation:
                    block = await self._shaped(deltas, partial(self._block, deltas, meter, has_begun=has_begun))
                    has_begun = True
                    if generation.is_moving and not self.writer.can_continue:
                        continue  # whoever goes on draws these again
                    if block:
                        generation.can_move = self.writer.can_continue
                        generation.can_keep = self.writer.can_keep
                        yield block
            except RequestMovedError as move:
                if move.key is not None:
                    yield self.writer.write_move(
                        KvTransferParams(
                            do_remote_prefill=True,
                            remote_host=move.host,
                            remote_port=move.port,
                            transfer_id=move.key,
                        )
                    )
                raise
        if self.stream_options.include_usage and not self.journal.has_usage:
            yield self.writer.write_usage(self.shape.usage_event(meter.usage()))
        yield DONE

    def _whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes:
        return self.shape.whole(best(sequences, self.requests[0].n, self.num_returned), usage)

    def _block(self, deltas: Sequence[SequenceDelta], meter: "UsageMeter", *, has_begun: bool) -> bytes:
        """The events of one turn."""
        events = [] if has_begun else [self.writer.begin(self.shape.first_event(self._chunk_usage(meter)))]
        for delta in map(self.shape.shown, deltas):
            meter.count(delta)
            events.append(self.writer.write(delta, self.shape.event(delta, self._chunk_usage(meter))))
        return b"".join(events)

    async def _shaped(self, deltas: Sequence[SequenceDelta], shape: Callable[[], bytes]) -> bytes:
        """What is made of these, beside the event loop where it takes long."""
        if self._num_logprobs(deltas) <= INLINE_LOGPROBS:
            return shape()
        return await asyncio.get_running_loop().run_in_executor(self.shapers, shape)

    def _num_logprobs(self, deltas: Sequence[SequenceDelta]) -> int:
        num_alternatives = self.requests[0].spec.sampling.logprobs
        if num_alternatives is None:
            return 0
        num_positions = sum(len(delta.logprobs) + len(delta.prompt_logprobs or ()) for delta in deltas)
        return num_positions * (1 + num_alternatives)

    @contextmanager
    def _generation(self) -> Iterator[Generation]:
        with (
            self.admission.hold(self._num_sequences),
            self.engine.generate(self.requests, self.journal.sequences, self.http_request_id) as generation,
        ):
            yield generation

    @property
    def _num_sequences(self) -> int:
        """That the engine works on."""
        return sum(request.spec.num_computed(request.n) for request in self.requests)

    def _meter(self) -> "UsageMeter":
        num_prompt_tokens = sum(request.spec.num_prompt_tokens for request in self.requests)
        return UsageMeter(num_prompt_tokens, self.requests[0].n, self.journal.sequences.values())

    def _chunk_usage(self, meter: "UsageMeter") -> ChunkUsage:
        if self.stream_options.continuous_usage_stats:
            return meter.usage()
        return None if self.stream_options.include_usage else UNSET


class UsageMeter:
    """Tokens of one exchange; a prompt continued `n` times is counted once."""

    def __init__(self, num_prompt_tokens: int, n: int, so_far: Iterable[SequenceDelta] = ()) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._num_completion_tokens = 0
        self._num_cached_by_prompt: dict[int, int] = {}
        for delta in so_far:
            self.count(delta)

    def count(self, delta: SequenceDelta) -> None:
        self._num_completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens:
            self._num_cached_by_prompt.setdefault(delta.index // self._n, delta.num_cached_tokens)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._num_cached_by_prompt.values())),
        )


def best(sequences: Sequence[SequenceDelta], num_candidates: int, num_returned: int) -> list[SequenceDelta]:
    """Of each prompt's candidates those of the highest log-probability per token, best first and numbered anew.

    That is OpenAI's `best_of`. Where all are returned they stay as they are.
    """
    if num_returned == num_candidates:
        return list(sequences)
    chosen: list[SequenceDelta] = []
    for first in range(0, len(sequences), num_candidates):
        candidates = sorted(sequences[first : first + num_candidates], key=_mean_logprob, reverse=True)
        chosen += candidates[:num_returned]
    return [msgspec.structs.replace(sequence, index=index) for index, sequence in enumerate(chosen)]


def _mean_logprob(sequence: SequenceDelta) -> float:
    logprobs = [position.logprobs[0] for position in sequence.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
