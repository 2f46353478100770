"""HTTP/1.1 towards clients: what one connection may make this process hold, and for how long.

uvicorn's protocol on httptools bounds nothing but the idle time after an answer. Here a head has a size, a number of
lines and a time, as has whatever else a client sends that is neither head nor body; a client that does not read has a
time, and is then cut off, wherever the answer was. The body is bounded where it is read, in `exchange`.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvasir_router.connections import Connections, peer_of
from kvasir_router.errors import (
    HeadTimeoutError,
    HeadTooLargeError,
    MalformedHttpError,
    RequestError,
    TooManyConnectionsError,
)

MAX_HEAD_BYTES = 64 * 1024
"""Of request line and headers; also of trailers, chunk extensions and what else the parser takes in without a word."""
MAX_HEADERS = 128
"""Trailers included."""
HEAD_SECONDS = 30.0
"""To the end of a request's head: from the connection, or from the first byte after the last request."""
READER_SECONDS = 60.0
"""For a full write buffer to drain to a quarter, and for all of it once the connection is to close."""


class _Transport:
    """The connection's transport, that once closed does not wait for its client to read for ever."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._abort_timer: asyncio.TimerHandle | None = None
        self.write = transport.write  # as quick as without this class between

    def close(self) -> None:
        self._transport.close()
        if self._abort_timer is None:
            self._abort_timer = self._loop.call_later(READER_SECONDS, self._transport.abort)

    def closed(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *, counted_in: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._counted_in = counted_in
        self.peer = ""
        self._is_in_head = False
        self._num_headers = 0
        self._num_header_bytes = 0
        self._has_understood = False  # something of what came last
        self._num_held_bytes = 0  # that the parser has taken in since it last said anything
        self._refusal: RequestError | None = None  # what the parser is stopped for
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._closing_transport = _Transport(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._closing_transport))
        self.peer = peer_of(self.client[0]) if self.client is not None else ""
        self._start_head_timer()
        self._counted_in.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._counted_in.closed(self)
        self._stop_head_timer()
        self._stop_reader_timer()
        super().connection_lost(exc)
        self._closing_transport.closed()

    def close(self) -> None:
        self.transport.close()

    def refuse_for_lack_of_room(self) -> None:
        self._refuse(TooManyConnectionsError("this router has too many connections, and none is idle; try again later"))

    # What the client sends

    def data_received(self, data: bytes) -> None:
        self._has_understood = False
        super().data_received(data)
        self._num_held_bytes = 0 if self._has_understood else self._num_held_bytes + len(data)
        if self._num_held_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        elif self.cycle is None or self.cycle.response_complete:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_headers = self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_header_bytes(len(name) + len(value))
        if self._is_in_head:  # a trailer is nothing that anybody here or at an engine has asked for
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._has_understood = True
        self._stop_head_timer()
        self._counted_in.busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_understood = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_understood = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or MalformedHttpError("this is no HTTP/1.1 request"))

    def _count_header_bytes(self, count: int) -> None:
        """Raises into the parser, which gives up."""
        self._num_header_bytes += count
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise self._refusal

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_took_too_long)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_took_too_long(self) -> None:
        if self._is_in_head:
            self._refuse(HeadTimeoutError(f"the request's head has not come within {HEAD_SECONDS:g} s"))
        else:
            self.close()  # nothing was asked: nothing is answered

    # What the client is sent

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next of a pipeline has begun
            self._counted_in.idle(self)
            if self._is_in_head:  # it had no time of its own while the answer went on
                self._start_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_reader_timer()
        super().resume_writing()

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _refuse(self, error: RequestError) -> None:
        """Answers, where no other answer has begun, and closes."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.close()


def _too_large() -> HeadTooLargeError:
    return HeadTooLargeError(
        f"the request's head is too large; it may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
    )
