"""One answer on a client's connection, as HTTP/1.1 frames it: by its length, in chunks, or by the connection's end.

The head goes out with the first piece of the body. Nothing is waited for: whoever writes is held back by the
connection, which knows when its client reads too slowly.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from kvasir_http.connections import Connections
from kvasir_router.relay.headers import RawHeaders, lines

_WITHOUT_BODY = frozenset({204, 304})
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
        """The last piece, as it was framed."""
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
        if not self._transport.is_closing():
            self._send(data)

    @property
    def write_chunk(self) -> Callable[[bytes], None] | None:
        """Writes a chunk that is framed already; None where the client is sent none."""
        return self._write_chunk if self._is_chunked else None

    def _write_chunk(self, chunk: bytes) -> None:
        """Never the first piece: with that goes the head."""
        self.last = chunk
        if not self._transport.is_closing():
            self._send(chunk)

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
