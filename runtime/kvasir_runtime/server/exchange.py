"""One request of a client under way, whole or as a stream of server-sent events: generate, count, shape, write, send.

What differs between the routes is a `Shape`: how deltas become their JSON. Nothing is sent before the first event is
there, so whatever goes wrong until then is answered with its own HTTP status; what goes wrong later is an error event
within the stream. A stream with a journal breaks off instead where the engine is at fault, so that the router continues
it elsewhere. A client that leaves cancels the work, and with it the requests in the core.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvasir_runtime.engine.async_engine import AsyncEngine, GenerateRequest
from kvasir_runtime.engine.generation import Generation, SequenceDelta
from kvasir_runtime.errors import EngineDeadError, KvasirRuntimeError, RequestMovedError, ServerUnavailableError
from kvasir_runtime.server.admission import Admission
from kvasir_runtime.server.errors import CLIENT_CLOSED_REQUEST
from kvasir_runtime.server.journal import BEGINS_HERE, RESUMABLE_HEADER, WITHOUT_JOURNAL, EventWriter, Journal
from kvasir_runtime.server.responses import PromptTokensDetails, Usage
from kvasir_runtime.transfer.params import KvTransferParams

logger = logging.getLogger(__name__)

INLINE_LOGPROBS = 2048
"""Fewer are shaped on the event loop: 5 ms."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""No proxy keeps events back."""
T = TypeVar("T")
_ENGINE_LOST = (EngineDeadError, ServerUnavailableError)
"""Not the request's fault: another replica can go on."""


class Shape(Protocol):
    """An answer as one route gives it, as JSON, which may be made in a thread; an event is empty where there is nothing
    to show."""

    def skip(self, sequence: SequenceDelta) -> None:
        """What another server has shown of one, before anything else is; with its text, where it goes on."""

    def shown(self, delta: SequenceDelta) -> SequenceDelta:
        """What the client is to see, and pay for, of a delta."""

    def whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes: ...

    def first_event(self, meter: "UsageMeter") -> bytes:
        """What precedes all sequences."""

    def event(self, delta: SequenceDelta, meter: "UsageMeter") -> bytes: ...

    def usage_event(self, usage: Usage) -> bytes:
        """What follows all sequences."""

    def end(self) -> bytes:
        """The last of a stream, after `usage_event`."""

    def error_event(self, error: KvasirRuntimeError) -> bytes:
        """The last of a stream that goes wrong."""


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
    journal: Journal = BEGINS_HERE
    writer: EventWriter = WITHOUT_JOURNAL
    http_request_id: str | None = None

    async def whole(self) -> bytes:
        meter = self._meter()
        with self._generation() as generation:
            sequences = [self.shape.shown(sequence) for sequence in await generation.whole()]
        for sequence in sequences:
            meter.count(sequence)
        if self._takes_long(sequences):
            return await self._in_thread(partial(self._whole, sequences, meter.usage()))
        return self._whole(sequences, meter.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        meter = self._meter()
        has_begun = self.journal.has_begun
        with self._generation() as generation:
            for sequence in self.journal.sequences.values():
                self.shape.skip(sequence)
            try:
                async for deltas in generation:
                    if self._takes_long(deltas):
                        block = await self._in_thread(partial(self._block, deltas, meter, has_begun=has_begun))
                    else:
                        block = self._block(deltas, meter, has_begun=has_begun)
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
        if not self.journal.has_usage and (event := self.shape.usage_event(meter.usage())):
            yield self.writer.write_usage(event)
        yield self.shape.end()

    def _whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes:
        return self.shape.whole(best(sequences, self.requests[0].n, self.num_returned), usage)

    def _block(self, deltas: Sequence[SequenceDelta], meter: "UsageMeter", *, has_begun: bool) -> bytes:
        """The events of one turn."""
        events = [] if has_begun else [self.writer.begin(self.shape.first_event(meter))]
        for delta in map(self.shape.shown, deltas):
            meter.count(delta)
            events.append(self.writer.write(delta, self.shape.event(delta, meter)))
        return b"".join(events)

    async def _in_thread(self, shape: Callable[[], bytes]) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self.shapers, shape)

    def _takes_long(self, deltas: Sequence[SequenceDelta]) -> bool:
        """To shape, for the event loop."""
        sampling = self.requests[0].spec.sampling
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            return False
        num_alternatives = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
        num_positions = sum(len(delta.logprobs) + len(delta.prompt_logprobs or ()) for delta in deltas)
        return num_positions * (1 + num_alternatives) > INLINE_LOGPROBS

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


class ClientGoneError(Exception):
    """The client left before its answer was ready."""


async def answer(request: Request, exchange: Exchange) -> Response:
    try:
        result = await unless_disconnected(request.receive, exchange.whole())
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(result, media_type="application/json")


async def event_stream(request: Request, exchange: Exchange) -> Response:
    """Waits for the first event; raises what goes wrong until then."""
    events = exchange.events()
    try:
        first = await unless_disconnected(request.receive, anext(events))
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(first, events, exchange)


class EventStream(Response):
    """Owns the generator of events and closes it, however the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], exchange: Exchange) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        if exchange.writer.is_resumable:
            self.headers[RESUMABLE_HEADER] = "1"
        self._first = first
        self._events = events
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(_more(self._first))
        try:
            async for event in self._events:
                await send(_more(event))
        except KvasirRuntimeError as error:
            request_id = self._exchange.requests[0].request_id
            logger.info("a stream ended with an error: %s", error, extra={"request_id": request_id})
            if not (self._exchange.writer.is_resumable and isinstance(error, _ENGINE_LOST)):
                await send(_more(self._exchange.shape.error_event(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _more(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled, and ClientGoneError raised, when the client leaves first."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for other in (task, leaving):
            other.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
