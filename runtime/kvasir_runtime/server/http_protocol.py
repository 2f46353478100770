"""HTTP/1.1 towards the public: what a client may send and hold, before it is answered and after, is bounded.

uvicorn's protocol on httptools bounds nothing: it takes a header of 150 MB, and waits for ever for a head and for a
reader. Here a head has a size, a number of lines and a time, whoever does not read is cut off (`client_transport`),
and connections are counted (`connections`). The body's size and time are bounded where it is read (`body`), and all
bodies together in `body_budget`.

Requests of one connection are answered one after the other. What a client sends ahead of its turn is kept unread, up to
a bound, but it is taken from the socket: only who reads there sees that a client leaves.
"""

import asyncio
from collections import deque
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvasir_runtime.server.client_limits import ClientLimits
from kvasir_runtime.server.client_transport import ClientTransport
from kvasir_runtime.server.connections import Connections, peer_of
from kvasir_runtime.server.errors import RETRY_AFTER_SECONDS
from kvasir_runtime.server.request_parser import RequestParser
from kvasir_runtime.server.responses import ErrorBody, ErrorResponse, to_json

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and all headers; also of trailers, of what is sent ahead of its turn, and of whatever else is
neither head nor body."""
MAX_HEADERS = 128
SLICE_BYTES = 4096
"""Parsed before anybody asks whose turn it is: of such a slice come 227 requests at most, each 2 kB of objects."""


class HeadTooLargeError(Exception):
    """Raised into the parser, which gives up."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *, connections: Connections, limits: ClientLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self.peer = ""
        self._connections_of_server = connections
        self._limits = limits
        self._unanswered: deque[RequestResponseCycle] = deque()
        """The first has begun."""
        self._receiving: RequestResponseCycle | None = None
        """Whose body comes."""
        self._ahead = bytearray()
        """What the parser has yet to see."""
        self._is_in_head = False
        self._has_understood = False
        self._num_held_bytes = 0
        """That the parser has taken in without saying anything of them."""
        self._num_header_bytes = 0
        self._num_headers = 0
        self._head_timer: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._client_transport = ClientTransport(transport, self.loop, self._limits)
        self.transport = cast(asyncio.Transport, self._client_transport)
        self.peer = "" if self.client is None else peer_of(self.client[0])
        self._start_head_timer()
        self._connections_of_server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_transport.lost()
        self._connections_of_server.closed(self)
        self._stop_head_timer()
        self._unset_keepalive_if_required()
        self._give_up_requests()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """A client that ends its side has left, though it may not have taken all that was written."""
        self._leave()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._client_transport.watch_reader()

    def resume_writing(self) -> None:
        self._client_transport.unwatch_reader()
        super().resume_writing()
        self._count_if_idle()

    def abort(self) -> None:
        self._client_transport.abort()

    def _leave(self) -> None:
        self._give_up_requests()
        self._count_if_idle()
        self._client_transport.close()

    def _count_if_idle(self) -> None:
        if not self._unanswered and not self.flow.write_paused:
            self._connections_of_server.idle(self)

    def _give_up_requests(self) -> None:
        """Each is told, the one that is answered as well as those that wait."""
        for request in self._unanswered:
            request.disconnected = True
            request.message_event.set()
        self._unanswered.clear()

    # What the client sends

    def data_received(self, data: bytes) -> None:
        if self._client_transport.is_closing():
            self._client_transport.discard(len(data))
            return
        self._read(data)
        self._watch_client()

    def _read(self, data: bytes) -> None:
        for begin in range(0, len(data), SLICE_BYTES):
            if self._is_ahead_of_its_turn:
                self._keep_for_later(data[begin:])
                return
            self._parse(data[begin : begin + SLICE_BYTES])
            if self._client_transport.is_closing():
                return

    @property
    def _is_ahead_of_its_turn(self) -> bool:
        return bool(self._unanswered) and self._unanswered[0] is not self._receiving

    def _keep_for_later(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) > MAX_HEAD_BYTES:
            self._client_transport.pause_reading()  # not by `flow`, which an application that reads a body resumes

    def _read_kept(self) -> None:
        kept, self._ahead = bytes(self._ahead), bytearray()
        self._read(kept)
        if len(self._ahead) <= MAX_HEAD_BYTES:
            self._client_transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        self._has_understood = False
        super().data_received(data)
        self._num_held_bytes = 0 if self._has_understood else self._num_held_bytes + len(data)
        if self._num_held_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._client_transport.is_client_sending = True
        self._num_header_bytes = 0
        self._num_headers = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES:
            raise HeadTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_understood = True
        self._is_in_head = False
        self._connections_of_server.busy(self)
        self.cycle = None  # type: ignore[assignment]  # so that uvicorn starts the next one, which has its turns below
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Called by uvicorn for every request."""
        self._receiving = cycle
        self._unanswered.append(cycle)
        if len(self._unanswered) == 1:
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._has_understood = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if cast(RequestParser, self.parser).is_upgrade_ignored:
            return
        self._has_understood = True
        self._receiving = None
        self._client_transport.is_client_sending = False
        super().on_message_complete()

    # What it is answered

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._unanswered.popleft()
        self._count_if_idle()
        if self._client_transport.is_closing():
            return
        self.flow.resume_reading()  # the rest of a body is read over
        if self._unanswered:
            super()._start_asgi_task(self._unanswered[0], self.app)
        if self._ahead and not self._is_ahead_of_its_turn:
            self._read_kept()
        self._watch_client()

    def send_400_response(self, msg: str) -> None:
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "malformed_http", "this is no HTTP/1.1 request")

    def refuse_for_lack_of_room(self) -> None:
        message = "this server has too many connections, and none is idle; try again"
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", message)

    def _refuse_head(self) -> None:
        message = f"the request's head is too long; it may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", message)

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        """Answer in OpenAI's shape, where no other answer is due before or under way, and close."""
        if self._client_transport.is_closing():
            return
        if self._is_answer_due:
            self._client_transport.write(_refusal(status, code, message))
        self._leave()

    @property
    def _is_answer_due(self) -> bool:
        """To what came last, and to nothing before."""
        if not self._unanswered:
            return self._receiving is None
        return not self._is_ahead_of_its_turn and not self._unanswered[0].response_started

    # While nothing is asked

    def _watch_client(self) -> None:
        """One timer at most: for the rest of what has begun to come, or for the next request."""
        if self._unanswered or self._client_transport.is_closing():
            self._stop_head_timer()
        elif self._client_transport.is_client_sending or self._num_held_bytes:
            self._start_head_timer()
        else:
            self._stop_head_timer()
            self._start_keepalive_timer()

    def _start_keepalive_timer(self) -> None:
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_seconds, self._time_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out(self) -> None:
        if self.cycle is not None and not self._is_in_head:
            self._client_transport.close()  # after an answer: nothing else was asked
            return
        message = f"the request's head has not come within {self._limits.head_seconds:g} seconds"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, "head_timeout", message)


def _refusal(status: HTTPStatus, code: str, message: str) -> bytes:
    is_overload = status == HTTPStatus.SERVICE_UNAVAILABLE
    kind = "service_unavailable_error" if is_overload else "invalid_request_error"
    body = to_json(ErrorResponse(ErrorBody(message, kind, None, code)))
    retry = b"retry-after: %d\r\n" % RETRY_AFTER_SECONDS if is_overload else b""
    head = b"content-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n" % (len(body), retry)
    return STATUS_LINE[status] + head + body
