"""Clients' connections: what is read and written of each, what they may take of a server, and how many there are.

A client that does not read has a time, and is then cut off with what was written to it. One that still sends when its
last answer is written is listened to for a moment: to close over unread bytes resets the connection, and a reset may
reach the client before the answer does.

A connection is idle unless a request's whole head has come and its answer is not over, or is yet to be read. Where
there are too many, the longest idle makes way, so that whoever opens connections and asks nothing shuts nobody out, and
probes get through; where none is idle, the newcomer is refused. Answers that clients have yet to take have a bound
together, beyond which whoever has been too slow for the longest is cut off.

A server that is told to stop drains: load balancers, Ingress controllers and `kubectl port-forward` go on sending for
seconds, and a refused connection is an error to all of them. So it goes on listening and answering, each answer with
`connection: close`, until nothing has been asked for a while.
"""

import asyncio
import ipaddress
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import httptools

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """A server that bounds more of its clients adds it."""

    head_seconds: float = 30.0
    """To the end of a request's head, from the connection or from the head's first byte; also for the rest of a body
    that was answered before."""
    keep_alive_seconds: float = 75.0
    """Between an answer and the next request: longer than the pools of usual clients and proxies keep a connection, so
    that they close it and never we."""
    reader_seconds: float = 60.0
    """For a full write buffer to drain, and for whatever is left of it once the connection is to close."""
    reader_bytes: int = 1024 * 1024
    """Of a longer buffer, as a large answer leaves it, so much is to be taken each time: 0.14 Mbit/s."""
    linger_seconds: float = 5.0
    """For a client that still sends when its last answer is written."""
    linger_bytes: int = 16 * 1024 * 1024
    """That it may send meanwhile."""


class ClientTransport:
    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, limits: ClientLimits) -> None:
        self._transport = transport
        self._loop = loop
        self._limits = limits
        self.write = transport.write  # as quick as without this class between
        self.abort = transport.abort
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.is_closing: Callable[[], bool] = transport.is_closing
        """As quick too, for every piece of a stream; not to be kept, since `close` puts another in its place."""
        self.is_client_sending = False
        """A request has begun to come and has not ended; the protocol tells."""
        self._num_discarded_bytes = 0
        self._num_untaken_bytes = 0
        self._reader_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """After what has been written."""
        if self.is_closing():
            return
        self.is_closing = _yes
        self.watch_reader()
        if self.is_client_sending:
            self._linger()
        else:
            self._transport.close()

    def lost(self) -> None:
        """There is no connection any more."""
        self.is_closing = _yes
        for timer in (self._reader_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()

    def discard(self, num_bytes: int) -> None:
        """Of what comes while it lingers."""
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > self._limits.linger_bytes:
            self._transport.close()

    def watch_reader(self) -> None:
        """From when the write buffer is full until `unwatch_reader`, or until all is taken of what is to close."""
        if self._reader_timer is None:
            self._num_untaken_bytes = self._transport.get_write_buffer_size()
            self._reader_timer = self._loop.call_later(self._limits.reader_seconds, self._look_at_reader)

    def unwatch_reader(self) -> None:
        if self._reader_timer is not None and self.is_closing is not _yes:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _look_at_reader(self) -> None:
        self._reader_timer = None
        num_taken_bytes = self._num_untaken_bytes - self._transport.get_write_buffer_size()
        if num_taken_bytes < self._limits.reader_bytes:
            self.abort()
        else:
            self.watch_reader()

    def _linger(self) -> None:
        self._transport.write_eof()
        self._transport.resume_reading()
        self._linger_timer = self._loop.call_later(self._limits.linger_seconds, self._transport.close)


def _yes() -> bool:
    return True


UNCOUNTED_BYTES = 4 * 1024
"""That each connection may have in its write buffer besides, which is empty as long as the kernel's has room."""


class RequestParser:
    """httptools' parser, which goes on where a client would rather speak another protocol.

    A server may ignore an Upgrade (RFC 9110 section 7.8), but llhttp takes everything behind such a head for that other
    protocol. Java's HTTP client asks for h2c with every first request of a connection, bodies and all. So the body, and
    whatever follows it, is read by a second parser, which is shown only the head's two lines that frame it.

    `protocol` has the parser's callbacks and collects a head's lines as `headers`, names in lower case.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._use(_new_parser(protocol))

    def _use(self, parser: httptools.HttpRequestParser) -> None:
        """What every request asks of it is asked without this class between."""
        self._parser = parser
        self.get_method = parser.get_method
        self.get_http_version = parser.get_http_version
        self.should_keep_alive = parser.should_keep_alive

    @property
    def is_upgrade_ignored(self) -> bool:
        """What is complete is the head alone: the second parser will say when the message is."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes | memoryview) -> None:
        """Raises httptools.HttpParserError, and HttpParserUpgrade for CONNECT."""
        while data:
            data = self._feed_until_upgrade(data)

    def _feed_until_upgrade(self, data: bytes | memoryview) -> bytes | memoryview:
        """What is left, for the parser of what follows."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.is_upgrade_ignored:
                raise
            self._read_body()
            return data[upgrade.args[0] :]
        return b""

    def _read_body(self) -> None:
        framing = [b"%s: %s\r\n" % line for line in self._protocol.headers if line[0] in _FRAMING]
        callbacks = _AfterHead(self._protocol)
        self._use(_new_parser(callbacks))
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        callbacks.is_past_head = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class _AfterHead:
    """The callbacks of a parser whose first head is not the client's."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self.is_past_head = False
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self.is_past_head:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.is_past_head:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_past_head:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.is_past_head:
            self._protocol.on_headers_complete()


def _new_parser(callbacks: Any) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: a pipeline's first answer may close it
    return parser


SPARE_DESCRIPTORS = 128
"""Of a process, for what is no client's connection."""
_LOOK_SECONDS = 0.02
"""Between two looks whether a server that drains still answers."""
_IPV6_HOST_PREFIX = 64
"""A host has a whole network of this size, and may take any address in it."""


class Connection(Protocol):
    @property
    def peer(self) -> str: ...

    def abort(self) -> None: ...

    def refuse_for_lack_of_room(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    total: int
    per_peer: int

    def within(self, descriptors: int, per_connection: int = 1) -> "ConnectionLimits":
        """No more than a process may have descriptors. Where that is less than is wanted, one peer may still have no
        more than half."""
        total = (descriptors - SPARE_DESCRIPTORS) // per_connection
        if descriptors == resource.RLIM_INFINITY or total >= self.total:
            return self
        return ConnectionLimits(max(1, total), max(1, min(self.per_peer, total // 2)))


class Connections:
    """Those of one server. `is_refusing` is for whoever handles requests, and set by who ends the server."""

    def __init__(self, limits: ConnectionLimits, most_unread_bytes: int | None = None) -> None:
        """`most_unread_bytes`: of answers that clients have yet to take; None: as many as there are."""
        self.is_draining = False
        """Every answer that begins is its connection's last."""
        self.is_refusing = False
        """The time that is left is for the requests that are being answered."""
        self._last_asked = 0.0
        self._limits = limits
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """Those without a request whose answer has been taken, but for a little; the longest idle first."""
        self._num_of_peer: Counter[str] = Counter()
        self._most_unread_bytes = most_unread_bytes
        self._num_unread_bytes: dict[Connection, int] = {}
        """Of those whose clients read too slowly, the longest so first."""
        self._total_unread_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """Counts it, or refuses it."""
        self._open.add(connection)
        self._idle[connection] = None
        self._num_of_peer[connection.peer] += 1
        if self._num_of_peer[connection.peer] > self._limits.per_peer:
            self._make_way(connection, connection.peer)
        elif len(self._open) > self._limits.total:
            self._make_way(connection, None)

    def idle(self, connection: Connection) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def held_back(self, connection: Connection, num_unread_bytes: int) -> None:
        """Until `taken`, it gets no more of its answer."""
        self.taken(connection)
        self._num_unread_bytes[connection] = num_unread_bytes
        self._total_unread_bytes += num_unread_bytes
        while self._most_unread_bytes is not None and self._total_unread_bytes > self._most_unread_bytes:
            slowest = next(iter(self._num_unread_bytes))
            self.taken(slowest)
            slowest.abort()

    def taken(self, connection: Connection) -> None:
        """May be repeated."""
        self._total_unread_bytes -= self._num_unread_bytes.pop(connection, 0)

    def closed(self, connection: Connection) -> None:
        """It may have made way, and been forgotten, before."""
        self.taken(connection)
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._idle.pop(connection, None)
        self._num_of_peer[connection.peer] -= 1
        if not self._num_of_peer[connection.peer]:
            del self._num_of_peer[connection.peer]

    def start_drain(self) -> None:
        self.is_draining = True
        self.asked()

    def asked(self) -> None:
        """A request has come that is no probe or scrape."""
        self._last_asked = asyncio.get_running_loop().time()

    async def until_quiet(self, seconds: float) -> None:
        """Returns once nothing is being answered and nothing has been asked for so long."""
        time_of = asyncio.get_running_loop().time
        while (seconds_left := self._last_asked + seconds - time_of()) > 0 or len(self._open) > len(self._idle):  # noqa: ASYNC110
            await asyncio.sleep(max(seconds_left, _LOOK_SECONDS))

    def _make_way(self, newcomer: Connection, peer: str | None) -> None:
        """The newcomer is idle too, and the last of all."""
        longest_idle = next(one for one in self._idle if peer is None or one.peer == peer)
        self.closed(longest_idle)
        if longest_idle is newcomer:
            newcomer.refuse_for_lack_of_room()
        else:
            longest_idle.abort()  # a close would wait for a client that does not read


@lru_cache(maxsize=4096)
def peer_of(host: str) -> str:
    """Whom an address belongs to, as far as it tells."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:  # how a dual-stack socket sees IPv4
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address.packed, _IPV6_HOST_PREFIX), strict=False))


def most_descriptors() -> int:
    """That the system lets the process have, and that it takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
