"""HTTP/1.1 towards the public: what a client may send and hold before it is answered is bounded.

uvicorn's protocol on httptools bounds nothing: it takes a header of 150 MB and waits for ever for a head. Here a head
has a size, a number of lines and a time, and connections are counted (`connections`). The body's size and time are
bounded where it is read (`body`).
"""

import asyncio
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvasir_runtime.server.connections import Connections, peer_of
from kvasir_runtime.server.request_parser import RequestParser
from kvasir_runtime.server.responses import ErrorBody, ErrorResponse, to_json

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and all headers; also of trailers and of whatever else is neither head nor body."""
MAX_HEADERS = 128
HEAD_SECONDS = 30.0
"""From a head's first byte, and from the connection, to the head's end."""


class HeadTooLargeError(Exception):
    """Raised into the parser, which gives up."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self.peer = ""
        self._connections_of_server = connections
        self._has_understood = False
        self._num_held_bytes = 0
        """That the parser has taken in without saying anything of them."""
        self._num_header_bytes = 0
        self._num_headers = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = "" if self.client is None else peer_of(self.client[0])
        self._start_head_timer()
        self._connections_of_server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections_of_server.closed(self)
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_understood = False
        super().data_received(data)
        self._num_held_bytes = 0 if self._has_understood else self._num_held_bytes + len(data)
        if self._num_held_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = 0
        self._num_headers = 0
        self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES:
            raise HeadTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_understood = True
        self._stop_head_timer()
        self._connections_of_server.busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_understood = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if cast(RequestParser, self.parser).is_upgrade_ignored:
            return
        self._has_understood = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next of a pipeline has begun
            self._connections_of_server.idle(self)

    def send_400_response(self, msg: str) -> None:
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self.refuse(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")

    def close(self) -> None:
        self.transport.close()

    def refuse_for_lack_of_room(self) -> None:
        message = "this server has too many connections, and none is idle; try again"
        self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, message)

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer in OpenAI's shape, where no other answer is under way, and close."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = to_json(ErrorResponse(ErrorBody(message, "invalid_request_error", None, None)))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _refuse_head(self) -> None:
        self.refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request's head is too long; it may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers",
        )

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._time_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out(self) -> None:
        message = f"the request's head has not come within {HEAD_SECONDS:g} seconds"
        self.refuse(HTTPStatus.REQUEST_TIMEOUT, message)
