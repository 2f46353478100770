"""HTTP/1.1 towards clients: what one connection may make this process hold, and for how long.

Requests that are forwarded are handled here, as bytes, without ASGI: one task each, cancelled the moment that the
connection is lost. Everything else goes the way of uvicorn's own protocol, which bounds nothing but the idle time after
an answer. Here a head has a size, a number of lines and a time, as has whatever else a client sends that is neither
head nor body; a client that does not read has a time, and is then cut off, wherever the answer was.

Requests of one connection are answered one after the other, in their order; what a client sends ahead is held up to a
bound, and read as long as it is within, since only who reads sees that a client leaves.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from kvasir_router.dialects.dialect import Dialect
from kvasir_router.errors import (
    HeadTimeoutError,
    HeadTooLargeError,
    MalformedHttpError,
    RequestError,
    TooManyConnectionsError,
)
from kvasir_router.relay.body import Body, BodyBudget
from kvasir_router.relay.client_times import CLIENT_TIMES, ClientTimes
from kvasir_router.relay.connections import Connections, peer_of
from kvasir_router.relay.drain import Drain
from kvasir_router.relay.exchange import Exchange
from kvasir_router.relay.headers import value_of
from kvasir_router.relay.request_parser import RequestParser
from kvasir_router.relay.response_writer import ResponseWriter, status_line

MAX_HEAD_BYTES = 64 * 1024
"""Of request line and headers; also of trailers, chunk extensions, what is sent ahead of its turn, and what else the
parser takes in without a word."""
MAX_HEADERS = 128
"""Trailers included."""


@dataclass(frozen=True)
class Forwarding:
    """Which requests are handled as bytes, by whom, and how large they may be."""

    dialects: Mapping[str, Dialect]  # by path; POST alone
    handle: Callable[[Exchange], Awaitable[None]]
    bodies: BodyBudget
    max_body_bytes: int
    cors_origins: Set[bytes] = frozenset()


class _Transport:
    """The connection's transport, that once closed does not wait for its client to read for ever."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, reader_seconds: float) -> None:
        self._transport = transport
        self._loop = loop
        self._reader_seconds = reader_seconds
        self._abort_timer: asyncio.TimerHandle | None = None
        self.write = transport.write  # as quick as without this class between
        self.is_closing = transport.is_closing

    def close(self) -> None:
        self._transport.close()
        if self._abort_timer is None:
            self._abort_timer = self._loop.call_later(self._reader_seconds, self._transport.abort)

    def closed(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. `forwarding` None: a server that forwards nothing."""

    def __init__(
        self,
        *,
        counted_in: Connections,
        drain: Drain,
        forwarding: Forwarding | None = None,
        times: ClientTimes = CLIENT_TIMES,
        **uvicorns: Any,
    ) -> None:
        super().__init__(**uvicorns)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self._counted_in = counted_in
        self._drain = drain
        self._forwarding = forwarding
        self._times = times
        self.peer = ""
        self._unanswered: deque[Exchange | RequestResponseCycle] = deque()
        self._has_begun = False  # the first of them is being handled
        self._receiving: Exchange | None = None  # whose body comes
        self._num_bytes_ahead = 0
        self._idle_since = 0.0
        self._is_in_head = False
        self._is_in_message = False  # the rest of the last request is still to come
        self._num_headers = 0
        self._num_header_bytes = 0
        self._has_understood = False  # something of what came last
        self._num_held_bytes = 0  # that the parser has taken in since it last said anything
        self._refusal: RequestError | None = None  # what the parser is stopped for
        self._late_refusal: RequestError | None = None  # of what came behind requests that are yet to be answered
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's, but for what only the application would be told."""
        self._closing_transport = _Transport(transport, self.loop, self._times.reader)
        self.transport = cast(asyncio.Transport, self._closing_transport)
        self.connections.add(self)
        self.flow = FlowControl(transport)
        self.client = get_remote_addr(transport)
        self.scheme = "http"
        self.peer = peer_of(self.client[0]) if self.client is not None else ""
        self._start_head_timer()
        self._counted_in.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._counted_in.closed(self)
        self._stop_head_timer()
        self._stop_reader_timer()
        self._unset_keepalive_if_required()
        self._drain.ended(len(self._unanswered))
        for request in self._unanswered:
            if isinstance(request, Exchange):
                request.leave()
            else:
                request.disconnected = True
                request.message_event.set()
        self._unanswered.clear()
        super().connection_lost(exc)
        self._closing_transport.closed()

    def close(self) -> None:
        self.transport.close()

    def shutdown(self) -> None:
        """What has been asked is answered, what is still sent is not."""
        if not self._unanswered:
            self.transport.close()
        for request in self._unanswered:
            if isinstance(request, Exchange):
                request.close_connection_after()
            else:
                request.keep_alive = False

    def refuse_for_lack_of_room(self) -> None:
        self._refuse(TooManyConnectionsError("this router has too many connections, and none is idle; try again later"))

    # What the client sends

    def data_received(self, data: bytes) -> None:
        if self._late_refusal is not None:
            self._hold_ahead(data)  # it is not read, only whether the client leaves
            return
        self._has_understood = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or MalformedHttpError("this is no HTTP/1.1 request"))
            return
        except httptools.HttpParserUpgrade:
            pass  # CONNECT, which the application refuses: what follows is not read
        self._num_held_bytes = 0 if self._has_understood else self._num_held_bytes + len(data)
        if self._num_held_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        elif not self._unanswered:
            self._start_head_timer()
        elif len(self._unanswered) > 1:
            self._hold_ahead(data)

    def _hold_ahead(self, data: bytes) -> None:
        self._num_bytes_ahead += len(data)
        if self._num_bytes_ahead > MAX_HEAD_BYTES:
            self.flow.pause_reading()

    def on_message_begin(self) -> None:
        """What uvicorn makes of a head is made when it turns out to be for the application."""
        self.url = b""
        self.headers = []
        self._is_in_head = True
        self._num_headers = self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_header_bytes(len(name) + len(value))
        if self._is_in_head:  # a trailer is nothing that anybody here or at an engine has asked for
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """What raises here makes nonsense of the head: it is no request that was begun."""
        self._is_in_head = False
        self._has_understood = True
        self._stop_head_timer()
        self._counted_in.busy(self)
        self._receiving = self._exchange()
        if self._receiving is not None:
            self._queue(self._receiving)
        else:
            self._ask_application()

    def _ask_application(self) -> None:
        """The head once more, for uvicorn."""
        self.server = self.server or get_local_addr(self.transport)
        url, headers = self.url, self.headers
        super().on_message_begin()
        super().on_url(url)
        for name, value in headers:
            super().on_header(name, value)
        self.cycle = None  # type: ignore[assignment]  # so that uvicorn starts it, which waits for its turn here
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Called by uvicorn for every request of the application's."""
        if self._drain.is_draining:
            cycle.keep_alive = False
        self._queue(cycle)

    def _queue(self, request: Exchange | RequestResponseCycle) -> None:
        self._is_in_message = True
        self._drain.begun()
        self._unanswered.append(request)
        self._begin_next()

    def on_body(self, body: bytes) -> None:
        self._has_understood = True
        if self._receiving is not None:
            self._receiving.body.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if cast(RequestParser, self.parser).is_upgrade_ignored:
            return
        self._has_understood = True
        self._is_in_message = False
        if self._receiving is not None:
            self._receiving.body.end()
        else:
            super().on_message_complete()

    def _exchange(self) -> Exchange | None:
        """None for what is not forwarded. A slash at the end of a path means nothing, and no engine sees it."""
        forwarding, parser = self._forwarding, self.parser
        if forwarding is None or parser.get_method() != b"POST":
            return None
        path, query = path_and_query(self.url)
        dialect = forwarding.dialects.get(path)
        if dialect is None:
            return None
        version = parser.get_http_version()
        keeps_alive = version != "1.0" and parser.should_keep_alive() and not self._drain.is_draining
        announced_bytes = int(value_of(self.headers, b"content-length") or 0)
        writer = ResponseWriter(
            cast(asyncio.Transport, self._closing_transport),
            self._drain,
            self.on_response_complete,
            takes_chunks=version == "1.1",
            keeps_alive=keeps_alive,
        )
        return Exchange(
            f"{path}?{query}" if query else path,
            self.headers,
            dialect,
            Body(forwarding.bodies, forwarding.max_body_bytes, announced_bytes, self._times),
            writer,
            forwarding.cors_origins,
        )

    def _count_header_bytes(self, count: int) -> None:
        """Raises into the parser, which gives up."""
        self._num_header_bytes += count
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise self._refusal

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._times.head, self._head_took_too_long)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_took_too_long(self) -> None:
        if self._is_in_head:
            self._refuse(HeadTimeoutError(f"the request's head has not come within {self._times.head:g} s"))
        else:
            self.close()  # nothing was asked: nothing is answered

    # What it is answered

    def _begin_next(self) -> None:
        """The oldest request, unless it has begun or the client has yet to read what was asked for before."""
        if self._has_begun or not self._unanswered or self.flow.write_paused:
            return
        self._has_begun = True
        self._num_bytes_ahead = 0
        self.flow.resume_reading()
        request = self._unanswered[0]
        if isinstance(request, Exchange):
            task = self.loop.create_task(self._handle(request))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
            request.begin(task, time.perf_counter())
        else:
            super()._start_asgi_task(request, self.app)

    async def _handle(self, exchange: Exchange) -> None:
        assert self._forwarding is not None
        try:
            await self._forwarding.handle(exchange)
        finally:
            if not exchange.has_ended:
                self.close()  # which tells the client that there is a rest

    def on_response_complete(self) -> None:
        if not self._unanswered:  # the connection was lost meanwhile
            return
        self.server_state.total_requests += 1
        self._unanswered.popleft()
        self._has_begun = False
        self._drain.ended()
        if self.transport.is_closing():
            return
        if self._late_refusal is not None and not self._num_whole:
            self._refuse(self._late_refusal)
            return
        if self._unanswered:
            self._begin_next()
            return
        self.flow.resume_reading()
        self._counted_in.idle(self)
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._check_idle()
        if self._is_in_head:  # it had no time of its own while the answer went on
            self._start_head_timer()

    def _check_idle(self) -> None:
        """One timer for many requests, which looks again when the time since the last one will be over."""
        self.timeout_keep_alive_task = None
        if self._unanswered or self._head_timer is not None:
            return
        seconds_left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if seconds_left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(seconds_left, self._check_idle)
        else:
            self.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(self._times.reader, self.transport.abort)
        if (exchange := self._answering()) is not None:
            exchange.hold_back()

    def resume_writing(self) -> None:
        self._stop_reader_timer()
        super().resume_writing()
        if (exchange := self._answering()) is not None:
            exchange.go_on()
        self._begin_next()

    def _answering(self) -> Exchange | None:
        first = self._unanswered[0] if self._has_begun and self._unanswered else None
        return first if isinstance(first, Exchange) else None

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    @property
    def _num_whole(self) -> int:
        """Unanswered requests that have come whole."""
        return max(len(self._unanswered) - self._is_in_message, 0)

    def _refuse(self, error: RequestError) -> None:
        """Answers, where no other answer has begun, and closes; after the answers to whatever was whole before."""
        if self.transport.is_closing():
            return
        if self._num_whole:
            self._late_refusal = error
            return
        if not self._unanswered or not _has_started(self._unanswered[0]):
            body = error.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(status_line(error.status) + head + body)
        self.close()


def path_and_query(target: bytes) -> tuple[str, str]:
    """The path without escapes, as uvicorn has it, and without slashes at its end."""
    url = httptools.parse_url(target)
    path = url.path.decode("ascii")
    if "%" in path:
        path = unquote(path)
    return path.rstrip("/"), (url.query or b"").decode("latin-1")


def _has_started(request: Exchange | RequestResponseCycle) -> bool:
    return request.has_started if isinstance(request, Exchange) else request.response_started


def _too_large() -> HeadTooLargeError:
    return HeadTooLargeError(
        f"the request's head is too large; it may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
    )
