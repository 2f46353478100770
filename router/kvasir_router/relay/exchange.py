"""One request of a client and its answer: what came, what was sent back so far, and how to end well in any case.

An answer is framed as HTTP/1.1 has it: by its length, in chunks, or by the connection's end. The head goes out with the
first piece of the body. Nothing is waited for: whoever writes is held back by the connection, which knows when its
client reads too slowly.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Set
from http import HTTPStatus

from kvasir_http.connections import Connections
from kvasir_router.dialects.dialect import Dialect
from kvasir_router.errors import RequestError, RouterStoppingError, UnknownContentEncodingError
from kvasir_router.relay.body import Body
from kvasir_router.relay.headers import RawHeaders, cors_headers, end_to_end, lines, value_of
from kvasir_router.relay.journal import RESUMABLE_HEADER, Journal
from kvasir_router.relay.upstream_answer import UpstreamAnswer, ignore

_WITHOUT_BODY = frozenset({204, 304})
_SLICE_BYTES, _END_BYTES = 16 * 1024, 64
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class ResponseWriter:
    """`on_end` is called once, when the last byte has been written. A connection that is lost swallows what comes."""

    def __init__(
        self,
        transport: asyncio.Transport,
        connections: Connections,
        on_end: Callable[[], None],
        *,
        takes_chunks: bool,
        keeps_alive: bool,
    ) -> None:
        self.has_started = False
        self.has_ended = False
        self.keeps_alive = keeps_alive
        """Whether the connection is for another request after this one."""
        self.last = b""
        """The last piece, as it was framed; of a large one its end."""
        self._transport = transport
        self._send = transport.write
        self._connections = connections
        self._on_end = on_end
        self._takes_chunks = takes_chunks  # not an HTTP/1.0 client's
        self._is_chunked = False
        self._head = b""

    @property
    def is_refused(self) -> bool:
        """The server ends, and the time that is left is for the requests that it answers already."""
        return self._connections.is_refusing

    def start(self, status: int, headers: RawHeaders) -> None:
        """Headers of the message alone, without those of the connection."""
        framing = b""
        if self._connections.is_draining:
            self.keeps_alive = False
        if status not in _WITHOUT_BODY and not any(name == b"content-length" for name, _ in headers):
            self._is_chunked = self._takes_chunks
            if self._is_chunked:
                framing = b"transfer-encoding: chunked\r\n"
            else:
                self.keeps_alive = False  # its end is the connection's
        if not self.keeps_alive:
            framing += b"connection: close\r\n"
        self._head = b"%b%b%b\r\n" % (status_line(status), lines(headers), framing)
        self.has_started = True

    def write(self, body: bytes) -> None:
        """For every piece of a stream: nothing is called here that need not be."""
        self.last = data = b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body
        if self._head:
            data, self._head = self._head + data, b""
        if len(data) > _SLICE_BYTES:
            self._send_large(data)
        elif not self._transport.is_closing():
            self._send(data)

    @property
    def write_chunk(self) -> Callable[[bytes], None] | None:
        """Writes a chunk that is framed already; None where the client is sent none."""
        return self._write_chunk if self._is_chunked else None

    def _write_chunk(self, chunk: bytes) -> None:
        """Never the first piece: with that goes the head."""
        self.last = chunk
        if len(chunk) > _SLICE_BYTES:
            self._send_large(chunk)
        elif not self._transport.is_closing():
            self._send(chunk)

    def _send_large(self, data: bytes) -> None:
        """In slices: the transport keeps whole what it could not hand on whole."""
        self.last = self.last[-_END_BYTES:]
        for begin in range(0, len(data), _SLICE_BYTES):
            if not self._transport.is_closing():
                self._send(data[begin : begin + _SLICE_BYTES])

    def write_comment(self, line: bytes) -> None:
        """Of an event stream, between two events: no piece of the answer."""
        last = self.last
        self.write(line)
        self.last = last

    @property
    def is_between_events(self) -> bool:
        return not self.last or self.has_sent_last(b"\n\n") or self.has_sent_last(b"\r\n\r\n")

    def has_sent_last(self, end: bytes) -> bool:
        """Whether the last piece ended so: a broken stream is to be ended between two events."""
        return self.last.endswith(end + b"\r\n" if self._is_chunked else end)

    def end(self) -> None:
        last = self._head + b"0\r\n\r\n" if self._is_chunked else self._head
        if last and not self._transport.is_closing():
            self._send(last)
        self._head = b""
        self.has_ended = True
        if not self.keeps_alive:
            self._transport.close()
        self._on_end()

    def send_interim(self) -> None:
        """A client that asked for it (`expect: 100-continue`) sends its body now."""
        if not self.has_started and not self._transport.is_closing():
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


KEEP_ALIVE = b": keep-alive\n"
"""No empty line follows: some clients would take it for the end of an event."""
_EARLY_HEAD = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_NUM_LOOKS = 8  # in the time after which a stream that brings nothing gets a comment
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
        translated: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.translated = translated
        """Makes the client's body the dialect's, where the client speaks another API; raises RequestError."""
        self.path = path  # as an engine knows it, however the client wrote it; with the query string
        self.headers = headers
        self.dialect = dialect
        self.body = body
        self.arrived = 0.0
        self.request_id = request_id_of(headers)
        self.has_started = False
        """An engine's answer has begun, or the router's own; of a stream that is kept alive the head went before."""
        self.is_event_stream = False
        self._becomes_event = False  # the answer to a stream, whose head went before, is none
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
        """Status and headers as they came, those of the connection apart, with the request's id. Where a stream's head
        went before, they are too late, and what is no event stream becomes its last event.
        """
        self.has_started = True
        if self.has_head:
            self._becomes_event = not _is_event_stream(dict(headers))
        else:
            self._start(status, headers)

    def keep_alive(self) -> None:
        """A comment for whatever closes connections that bring nothing. Fixes the status to 200."""
        if not self.has_head:
            self._start(200, _EARLY_HEAD)
        is_interrupted = not self.is_event_stream or not self._writer.is_between_events
        if not is_interrupted and not self._is_held_back and not self.has_whole_stream:
            self._writer.write_comment(KEEP_ALIVE)

    def _start(self, status: int, headers: RawHeaders) -> None:
        passed = end_to_end(headers, _NOT_RELAYED)
        if self._cors_origins:
            passed = [header for header in passed if not header[0].startswith(b"access-control-")]
            passed.extend(cors_headers(self._cors_origins, self.headers))
        named = dict(passed)
        if b"x-request-id" not in named:
            passed.append((b"x-request-id", self.request_id.encode("latin-1")))
        self.is_event_stream = _is_event_stream(named)
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
            if self._becomes_event:
                await self._relay_as_event(answer, on_first_byte)
            elif write is None:
                await answer.relay(self.write, on_first_byte, self._writer.write_chunk)
            else:
                await answer.relay(write, on_first_byte)
        finally:
            self._source = None

    async def _relay_as_event(self, answer: UpstreamAnswer, on_first_byte: Callable[[int], None]) -> None:
        def write(piece: bytes) -> None:
            if line := piece.translate(None, b"\r\n"):
                self.write(line)

        self.write(b"data: ")
        await answer.relay(write, on_first_byte)
        self.write(b"\n\n")

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
        if not self.has_head:
            self._answer(error)
        elif self.is_event_stream:
            separator = b"" if self._writer.is_between_events else b"\n\n"
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
    def has_head(self) -> bool:
        return self._writer.has_started

    @property
    def last_piece(self) -> bytes:
        """Another object with each that is written."""
        return self._writer.last

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


class KeepAlives:
    """Streams that bring nothing for `seconds` get a comment, an eighth of that later at most; 0: never.

    One timer for all of them, and nothing to do for a piece of a stream.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._seconds = seconds
        self._loop = loop
        self._watched: dict[Exchange, tuple[bytes, float]] = {}  # the last piece that was seen, and since when
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, stream: Exchange) -> None:
        if self._seconds:
            self._watched[stream] = stream.last_piece, self._loop.time()
            if self._timer is None:
                self._look_later()

    def forget(self, stream: Exchange) -> None:
        """May be repeated, or of one that is not watched."""
        self._watched.pop(stream, None)

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(self._seconds / _NUM_LOOKS, self._look)

    def _look(self) -> None:
        self._timer, now = None, self._loop.time()
        if self._watched:
            self._look_later()
        for stream, (piece, since) in self._watched.items():
            is_silent = stream.last_piece is piece
            if is_silent and now - since < self._seconds:
                continue
            if is_silent:
                stream.keep_alive()
            self._watched[stream] = stream.last_piece, now


def _is_event_stream(named: Mapping[bytes, bytes]) -> bool:
    """In plain text, without a length: something may be added."""
    is_plain = named.get(b"content-encoding", b"identity") == b"identity" and b"content-length" not in named
    return is_plain and named.get(b"content-type", b"").startswith(b"text/event-stream")


def request_id_of(headers: RawHeaders) -> str:
    """The client's own, or a new one."""
    given = value_of(headers, b"x-request-id")
    return given.decode("latin-1") if given else f"{random.getrandbits(_NUM_ID_BITS):032x}"
