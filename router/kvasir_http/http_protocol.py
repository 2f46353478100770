"""HTTP/1.1 towards clients: what one connection may send and hold, before it is answered and after, is bounded.

uvicorn's protocol on httptools bounds nothing: it takes a header of 150 MB, and waits for ever for a head and for a
reader. Here a head has a size, a number of lines and a time, whoever does not read is cut off (`ClientTransport`),
and connections are counted (`connections`). Bodies are bounded where they are read.

Requests of one connection are answered one after the other, in their order. What a client sends ahead of its turn is
kept unread, up to a bound, but it is taken from the socket: only who reads there sees that a client leaves.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from kvasir_http.connections import (
    UNCOUNTED_BYTES,
    ClientLimits,
    ClientTransport,
    Connections,
    RequestParser,
    peer_of,
)

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and all headers; also of trailers, of what is sent ahead of its turn, and of whatever else is
neither head nor body."""
MAX_HEADERS = 128
"""Trailers included."""
SLICE_BYTES = 4096
"""Parsed before anybody asks whose turn it is: of such a slice come 227 requests at most, each 2 kB of objects. Larger
reads are cut where a head ends."""
RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to what is no request."""

    status: HTTPStatus
    code: str
    message: str


NO_ROOM = Refusal(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "too_many_connections",
    "this server has too many connections, and none is idle; try again later",
)
HEAD_TOO_LARGE = Refusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "head_too_large",
    f"the request's head is too large; it may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers",
)
MALFORMED = Refusal(HTTPStatus.BAD_REQUEST, "malformed_http", "this is no HTTP/1.1 request")


class HeadTooLargeError(Exception):
    """Raised into the parser, which gives up."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Whoever answers some requests without ASGI makes objects of its own of them: `make_request` and
    the methods behind it say how requests are handled.
    """

    overload_type = "service_unavailable_error"
    """The `type` of OpenAI's error object where there are too many connections."""

    def __init__(self, *, connections: Connections, limits: ClientLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self.peer = ""
        self._connections_of_server = connections
        self._limits = limits
        self.unanswered: deque[Any] = deque()
        self.has_begun = False
        """The first of them is being handled."""
        self.receiving: Any = None
        """Whose body comes."""
        self.num_body_bytes_left = 0
        """Of it, where its length was announced."""
        self._ahead = bytearray()
        """What the parser has yet to see."""
        self._late_refusal: Refusal | None = None
        """Of what came behind requests that are yet to be answered."""
        self._is_in_head = False
        self._has_understood = False
        self._num_held_bytes = 0
        """That the parser has taken in without saying anything of them."""
        self._num_header_bytes = 0
        self._num_headers = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's, but for what only the application would be told."""
        self._client_transport = ClientTransport(transport, self.loop, self._limits)
        self.transport = cast(asyncio.Transport, self._client_transport)
        transport.set_write_buffer_limits(UNCOUNTED_BYTES)
        self.connections.add(self)
        self.flow = FlowControl(transport)
        self.client = get_remote_addr(transport)
        self.scheme = "http"
        self.peer = "" if self.client is None else peer_of(self.client[0])
        self._start_head_timer()
        self._connections_of_server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_transport.lost()
        self._connections_of_server.closed(self)
        self._stop_head_timer()
        self._unset_keepalive_if_required()
        self.give_up_all()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """A client that ends its side has left, though it may not have taken all that was written."""
        self._leave()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._client_transport.watch_reader()
        self.loop.call_soon(self._count_unread)  # with the rest of what is being written

    def _count_unread(self) -> None:
        if self.flow.write_paused and self in self.connections:
            self._connections_of_server.held_back(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._client_transport.unwatch_reader()
        self._connections_of_server.taken(self)
        super().resume_writing()
        self._count_if_idle()
        self._begin_next()

    def abort(self) -> None:
        self._client_transport.abort()

    def shutdown(self) -> None:
        """What has been asked is answered, what is still sent is not."""
        if not self.unanswered:
            self.transport.close()
        for request in self.unanswered:
            self.close_after(request)

    def _leave(self) -> None:
        self.give_up_all()
        self._count_if_idle()
        self._client_transport.close()

    def _count_if_idle(self) -> None:
        if not self.unanswered and not self.flow.write_paused:
            self._connections_of_server.idle(self)

    # How a request is handled

    def make_request(self) -> Any:
        """Of a head that has come. What raises makes nonsense of it: it is no request that was begun."""
        self.server = self.server or get_local_addr(self.transport)
        url, headers = self.url, self.headers
        super().on_message_begin()
        super().on_url(url)
        for name, value in headers:
            super().on_header(name, value)
        self.cycle = None  # type: ignore[assignment]  # so that uvicorn makes the next one
        super().on_headers_complete()
        return self.cycle

    def begin(self, request: Any) -> None:
        """It is its turn."""
        if self._connections_of_server.is_draining:
            self.close_after(request)
        app = self.app if request.scope["http_version"] == "1.1" else cast(Any, _Unchunked(self.app, request))
        super()._start_asgi_task(request, app)

    def give_up(self, request: Any) -> None:
        """Its client is gone."""
        request.disconnected = True
        request.message_event.set()

    def take_body(self, body: bytes) -> None:
        """A part of it, of the request that is `receiving`."""
        super().on_body(body)

    def end_body(self) -> None:
        super().on_message_complete()

    def has_started(self, request: Any) -> bool:
        """Something of the answer has been sent."""
        return bool(request.response_started)

    def close_after(self, request: Any) -> None:
        """Its answer is the connection's last."""
        request.keep_alive = False

    def give_up_all(self) -> None:
        """The one that is answered as well as those that wait."""
        for request in self.unanswered:
            self.give_up(request)
        self.unanswered.clear()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Called by uvicorn for every head; here a request waits for its turn."""

    def _begin_next(self) -> None:
        """The oldest request, unless the client has yet to read what it asked for before."""
        if self.unanswered and not self.has_begun and not self.flow.write_paused:
            self.has_begun = True
            self.begin(self.unanswered[0])

    # What the client sends

    def data_received(self, data: bytes) -> None:
        if self._client_transport.is_closing():
            self._client_transport.discard(len(data))
            return
        if len(data) <= SLICE_BYTES and not self.unanswered:
            self._parse(data)
        else:
            self._read(data)
        self._watch_client()

    def _read(self, data: bytes) -> None:
        """Slice by slice, as long as it is anybody's turn."""
        begin = 0
        while begin < len(data) and not self._client_transport.is_closing():
            if self._is_ahead_of_its_turn:
                self._keep_for_later(data[begin:])
                return
            end = self._end_of_slice(data, begin)
            self._parse(memoryview(data)[begin:end])
            begin = end

    def _end_of_slice(self, data: bytes, begin: int) -> int:
        """A head, or a body of known length, is one: nobody's request can hide in it."""
        if self.num_body_bytes_left:
            return begin + self.num_body_bytes_left
        end_of_head = data.find(b"\r\n\r\n", begin, begin + SLICE_BYTES)
        return begin + SLICE_BYTES if end_of_head < 0 else end_of_head + 4

    @property
    def _is_ahead_of_its_turn(self) -> bool:
        return bool(self.unanswered) and self.unanswered[0] is not self.receiving

    def _keep_for_later(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) > MAX_HEAD_BYTES:
            self._client_transport.pause_reading()  # not by `flow`, which an application that reads a body resumes

    def _read_kept(self) -> None:
        kept, self._ahead = bytes(self._ahead), bytearray()
        self._read(kept)
        if len(self._ahead) <= MAX_HEAD_BYTES and not self.flow.read_paused:
            self._client_transport.resume_reading()

    def _parse(self, data: bytes | memoryview) -> None:
        self._has_understood = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            is_too_large = self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES
            self._refuse(HEAD_TOO_LARGE if is_too_large else MALFORMED)
            return
        except httptools.HttpParserUpgrade:
            pass  # CONNECT, which the application refuses: what follows is not read
        self._num_held_bytes = 0 if self._has_understood else self._num_held_bytes + len(data)
        if self._num_held_bytes > MAX_HEAD_BYTES:
            self._refuse(HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        """What uvicorn makes of a head is made when it turns out to be for the application."""
        self.url = b""
        self.headers = []
        self._is_in_head = True
        self._client_transport.is_client_sending = True
        self._num_headers = self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_header_bytes(len(name) + len(value))
        if self._is_in_head:  # a trailer is nothing that anybody has asked for
            name = name.lower()
            self.headers.append((name, value))
            if name == b"content-length":
                self.num_body_bytes_left = int(value)

    def _count_header_bytes(self, count: int) -> None:
        self._num_header_bytes += count
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES:
            raise HeadTooLargeError

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._has_understood = True
        self.receiving = request = self.make_request()
        self._connections_of_server.busy(self)
        if self._connections_of_server.is_draining and self.parser.get_method() == b"POST":
            self._connections_of_server.asked()
        self.unanswered.append(request)
        self._begin_next()

    def on_body(self, body: bytes) -> None:
        self._has_understood = True
        if self.num_body_bytes_left:
            self.num_body_bytes_left -= len(body)
        self.take_body(body)

    def on_message_complete(self) -> None:
        if cast(RequestParser, self.parser).is_upgrade_ignored:
            return
        self._has_understood = True
        self.num_body_bytes_left = 0
        self._client_transport.is_client_sending = False
        self.end_body()
        self.receiving = None

    # What it is answered

    def on_response_complete(self) -> None:
        if not self.unanswered:  # given up meanwhile
            return
        self.server_state.total_requests += 1
        self.unanswered.popleft()
        self.has_begun = False
        self._count_if_idle()
        if self._client_transport.is_closing():
            return
        if self._late_refusal is not None and not self._num_whole:
            self._refuse(self._late_refusal)
            return
        self.flow.resume_reading()  # the rest of a body is read over
        self._idle_since = self.loop.time()
        self._begin_next()
        if self._ahead and not self._is_ahead_of_its_turn:
            self._read_kept()
        self._watch_client()

    def refuse_for_lack_of_room(self) -> None:
        self._refuse(NO_ROOM)

    @property
    def _num_whole(self) -> int:
        """Unanswered requests that have come whole."""
        is_last_coming = bool(self.unanswered) and self.unanswered[-1] is self.receiving
        return len(self.unanswered) - is_last_coming

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, where nothing else has been answered to what came last, and close; after the answers to whatever came
        whole before.
        """
        if self._client_transport.is_closing():
            return
        if self._num_whole:
            self._late_refusal = refusal
            return
        if not self.has_started(self.unanswered[0]) if self.unanswered else self.receiving is None:
            self._client_transport.write(self._answer(refusal))
        self._leave()

    def _answer(self, refusal: Refusal) -> bytes:
        """In OpenAI's shape."""
        is_overload = refusal.status == HTTPStatus.SERVICE_UNAVAILABLE
        kind = self.overload_type if is_overload else "invalid_request_error"
        error = {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}
        body = msgspec.json.encode({"error": error})
        retry = b"retry-after: %d\r\n" % RETRY_AFTER_SECONDS if is_overload else b""
        head = b"content-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        return STATUS_LINE[refusal.status] + head % (len(body), retry) + body

    # While nothing is asked

    def _watch_client(self) -> None:
        """For the rest of what has begun to come, or for the next request."""
        if self.unanswered or self._client_transport.is_closing():
            if self._head_timer is not None:
                self._stop_head_timer()
        elif self._client_transport.is_client_sending or self._num_held_bytes:
            self._start_head_timer()
        else:
            self._stop_head_timer()
            if self.timeout_keep_alive_task is None:
                self._look_if_idle()

    def _look_if_idle(self) -> None:
        """One timer for many requests, which looks again when the time since the last one will be over."""
        self.timeout_keep_alive_task = None
        if self.unanswered or self._head_timer is not None:
            return
        seconds_left = self._idle_since + self._limits.keep_alive_seconds - self.loop.time()
        if seconds_left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(seconds_left, self._look_if_idle)
        else:
            self.transport.close()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_seconds, self._time_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out(self) -> None:
        if not self._is_in_head:
            self.transport.close()  # nothing was asked: nothing is answered
            return
        message = f"the request's head has not come within {self._limits.head_seconds:g} seconds"
        self._refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, "head_timeout", message))


class _Unchunked:
    """The application for a client of HTTP/1.0, which knows no chunks (RFC 9112 section 6.1): an answer of unknown
    length ends with the connection. uvicorn is told each part's length as if it were all.
    """

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = cast(ASGIApp, app)
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unchunked(message: Message) -> None:
            self._cycle.chunked_encoding = False
            self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unchunked)
