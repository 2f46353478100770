"""One request of a client and its answer: what came, what was sent back so far, and how to end well in any case."""

import asyncio
import random
from collections.abc import Callable, Set

from kvasir_router.dialects.dialect import Dialect
from kvasir_router.errors import RequestError, RouterStoppingError, UnknownContentEncodingError
from kvasir_router.relay.body import Body
from kvasir_router.relay.headers import RawHeaders, cors_headers, end_to_end, value_of
from kvasir_router.relay.journal import RESUMABLE_HEADER, Journal
from kvasir_router.relay.response_writer import ResponseWriter
from kvasir_router.relay.upstream_answer import UpstreamAnswer, ignore

_NOT_RELAYED = frozenset({RESUMABLE_HEADER.encode()})
_NUM_ID_BITS = 128


class Exchange:
    """`journal`, set by whoever relays, is what another engine needs to continue the stream; None where the answer
    cannot be continued. `has_client_left` tells a cancellation on the client's account from one on the server's.
    """

    def __init__(
        self,
        path: str,
        headers: list[tuple[bytes, bytes]],
        dialect: Dialect,
        body: Body,
        writer: ResponseWriter,
        cors_origins: Set[bytes] = frozenset(),
    ) -> None:
        self.path = path  # as an engine knows it, however the client wrote it; with the query string
        self.headers = headers
        self.dialect = dialect
        self.body = body
        self.arrived = 0.0
        self.request_id = _request_id(headers)
        self.is_event_stream = False
        self.journal: Journal | None = None
        self.has_client_left = False
        self.write = writer.write  # a part of the answer's body
        self._writer = writer
        self._cors_origins = cors_origins  # none: engines decide
        self._source: UpstreamAnswer | None = None
        self._is_held_back = False
        self._task: asyncio.Task[None] | None = None

    # For the handler

    @property
    def has_started(self) -> bool:
        return self._writer.has_started

    @property
    def is_held_back(self) -> bool:
        """The client reads too slowly."""
        return self._is_held_back

    @property
    def can_go_elsewhere(self) -> bool:
        """Another endpoint could still give the answer, or the rest of it."""
        return not self.has_started or (self.journal is not None and not self.journal.is_given_up)

    @property
    def has_whole_stream(self) -> bool:
        """The client has the last event; what becomes of the connection it came by does not matter."""
        end_of_stream = self.dialect.end_of_stream
        return end_of_stream is not None and self._writer.has_sent_last(end_of_stream)

    async def receive(self) -> bytes:
        """The request's body. Raises RequestError."""
        if self._writer.is_refused:
            raise RouterStoppingError("the router is stopping and takes no more requests", retry_after_seconds=1)
        coding = value_of(self.headers, b"content-encoding")
        if coding is not None and coding.strip().lower() not in (b"", b"identity"):
            name = coding.decode("latin-1")
            raise UnknownContentEncodingError(f"content-encoding {name!r} is not known here; send the body as it is")
        if not self.body.is_over and value_of(self.headers, b"expect") is not None:
            self._writer.send_interim()
        await self.body.read()
        return self.body.content

    def start(self, status: int, headers: RawHeaders) -> None:
        """Status and headers as they came, those of the connection apart, with the request's id."""
        passed = end_to_end(headers, _NOT_RELAYED)
        if self._cors_origins:
            passed = [header for header in passed if not header[0].startswith(b"access-control-")]
            passed.extend(cors_headers(self._cors_origins, self.headers))
        named = dict(passed)
        if b"x-request-id" not in named:
            passed.append((b"x-request-id", self.request_id.encode("latin-1")))
        is_endless = b"content-length" not in named
        self.is_event_stream = is_endless and named.get(b"content-type", b"").startswith(b"text/event-stream")
        self._writer.start(status, passed)

    async def relay(
        self,
        answer: UpstreamAnswer,
        write: Callable[[bytes], None] | None = None,
        on_first_byte: Callable[[int], None] = ignore,
    ) -> None:
        """The answer's body to its end, no faster than the client reads. Raises as the answer does.

        `write` None: as it comes.
        """
        self._source = answer
        if self._is_held_back:
            answer.pause()
        try:
            if write is None:
                await answer.relay(self.write, on_first_byte, self._writer.write_chunk)
            else:
                await answer.relay(write, on_first_byte)
        finally:
            self._source = None

    def end(self) -> None:
        self._writer.end()

    def drop(self) -> None:
        """Nothing can need its body or journal any more."""
        self.body.drop()
        if self.journal is not None:
            self.journal.drop()

    def fail(self, error: RequestError) -> None:
        """An error as answer, or as the last event of a stream, as the client's API has them.

        Any other answer that has begun cannot be mended: it stays unfinished, and the connection is closed.
        """
        if not self.has_started:
            self._answer(error)
        elif self.is_event_stream:
            separator = b"" if self._writer.has_sent_last(b"\n\n") else b"\n\n"
            self.write(separator + self.dialect.error_event(error))
            self.end()

    def _answer(self, error: RequestError) -> None:
        body = self.dialect.error_body(error)
        if error.ends_connection:
            self.close_connection_after()
        self.start(error.status, [*error.headers(), (b"content-length", b"%d" % len(body))])
        self.write(body)
        self.end()

    # For the client's connection

    @property
    def has_ended(self) -> bool:
        return self._writer.has_ended

    def begin(self, task: asyncio.Task[None], now: float) -> None:
        """`task` handles it, from `now` on (time.perf_counter)."""
        self._task = task
        self.arrived = now

    def hold_back(self) -> None:
        """The client reads too slowly."""
        self._is_held_back = True
        if self._source is not None:
            self._source.pause()

    def go_on(self) -> None:
        self._is_held_back = False
        if self._source is not None:
            self._source.resume()

    def close_connection_after(self) -> None:
        self._writer.keeps_alive = False

    def leave(self) -> None:
        """The client's connection is gone: nobody is left to work for."""
        self.has_client_left = True
        if self._task is None:
            self.body.drop()
        else:
            self._task.add_done_callback(lambda _: self.body.drop())  # the task may not even have started
            self._task.cancel()


def _request_id(headers: RawHeaders) -> str:
    given = value_of(headers, b"x-request-id")
    return given.decode("latin-1") if given else f"{random.getrandbits(_NUM_ID_BITS):032x}"
