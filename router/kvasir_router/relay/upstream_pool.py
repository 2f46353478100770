"""All connections towards engines: kept while they are idle, opened where none is, one answer at a time on each.

An engine may close an idle connection in the very moment in which a request is written to it. Where nothing of an
answer came, the request is written again, once, to a fresh connection: what is forwarded here has no effect at an
engine but its answer.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from kvasir_router.errors import UpstreamConnectError, UpstreamLostError
from kvasir_router.relay.upstream_answer import IdleTimeouts, UpstreamAnswer
from kvasir_router.relay.upstream_connection import UpstreamConnection

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine listens: the base URL that everybody knows it by, taken apart once."""

    url: str
    host: str  # a name, or a literal address; IPv6 without brackets
    port: int
    is_tls: bool
    host_header: bytes

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """Raises ValueError for what is no base URL of HTTP."""
        parts = urlsplit(url)
        host, default_port = parts.hostname, _DEFAULT_PORTS.get(parts.scheme)
        try:
            port = parts.port
        except ValueError:
            host = None
        if not host or default_port is None or parts.path not in ("", "/") or "@" in parts.netloc:
            raise ValueError(f"{url!r} is not the base URL of an engine; write for example http://127.0.0.1:8000")
        named = f"[{host}]".encode() if ":" in host else host.encode("idna")
        header = named if port is None else b"%b:%d" % (named, port)
        return cls(url, host, port or default_port, parts.scheme == "https", header)


@dataclass(frozen=True)
class UpstreamTimes:
    """Seconds."""

    keepalive: float = 4.0
    """Just under the 5 s after which uvicorn, which serves the engines, closes an idle connection."""
    close_race: float = 1.0
    """A reused connection that is lost within this time was closed as idle; later, it is the request that was lost."""
    sweep: float = 1.0
    """Between two looks for connections that have been idle for too long."""


UPSTREAM_TIMES = UpstreamTimes()


@dataclass(slots=True)
class Sending:
    """A request on its way to an engine; without a connection it waits for one."""

    origin: Origin
    request: Sequence[bytes]
    num_bytes: int  # of all parts
    connection: UpstreamConnection | None = None
    written_at: float = 0.0
    answer: UpstreamAnswer | None = None


class UpstreamPool:
    """To be used as a context: at its end no connection is left. It belongs to one event loop."""

    def __init__(
        self, connect_timeout_seconds: float, idle_seconds: float, times: UpstreamTimes = UPSTREAM_TIMES
    ) -> None:
        """`idle_seconds` is the longest time that an answer may bring nothing of its body."""
        self._times = times
        self._connect_timeout_seconds = connect_timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._idle_timeouts = IdleTimeouts(idle_seconds, self._loop)
        self._open: set[UpstreamConnection] = set()
        self._idle: dict[str, deque[UpstreamConnection]] = {}  # by engine; the longest idle first
        self._sweeper: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._all_lost = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Connections that are open, idle ones included."""
        return len(self._open)

    async def __aenter__(self) -> "UpstreamPool":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        self._idle_timeouts.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._open):
            connection.abort()
        if self._open:
            await self._all_lost.wait()

    async def post(self, url: str, target: bytes, headers: bytes, content: Sequence[bytes]) -> UpstreamAnswer:
        """`send` and `answer` in one."""
        return await self.answer(self.send(url, target, headers, content))

    def take_heard(self, url: str) -> bool:
        """Whether a byte has come from there since this was last asked."""
        was_heard = False
        for connection in self._open:
            if connection.url == url and connection.has_been_heard:
                was_heard, connection.has_been_heard = True, False
        return was_heard

    def send(self, url: str, target: bytes, headers: bytes, content: Sequence[bytes]) -> Sending:
        """At once where a connection is idle, so that whoever calls has time for what the engine need not wait for.

        `headers` are whole lines, all but host and content-length; `content` is sent piece after piece. `answer` is to
        follow. Raises UpstreamConnectError.
        """
        origin = _origin(url)
        num_body_bytes = sum(map(len, content))
        head = _head(origin, target, headers, num_body_bytes)
        sending = Sending(origin, (head, *content), len(head) + num_body_bytes)
        connection = self._take_idle(url)
        if connection is not None:
            self._write(sending, connection)
        return sending

    async def answer(self, sending: Sending) -> UpstreamAnswer:
        """Returns once the first bytes of the answer's body are there, or its end; the caller closes it.

        Raises UpstreamError or RequestTimeoutError.
        """
        if sending.connection is not None:
            try:
                return await self._begun(sending)
            except UpstreamLostError:
                is_late = self._loop.time() - sending.written_at > self._times.close_race
                if not sending.connection.is_silent or is_late:
                    raise
        self._write(sending, await self._connect(sending.origin))
        return await self._begun(sending)

    def _write(self, sending: Sending, connection: UpstreamConnection) -> None:
        sending.connection, sending.written_at = connection, self._loop.time()
        sending.answer = UpstreamAnswer(connection.url, connection, self._idle_timeouts, self._loop)
        connection.send(sending.request, sending.num_bytes, sending.answer)

    async def _begun(self, sending: Sending) -> UpstreamAnswer:
        """Its request is kept no longer than it may have to be written again."""
        answer = sending.answer
        assert answer is not None
        try:
            await answer.begin()
        except BaseException:
            answer.close()
            raise
        sending.request = ()
        return answer

    async def _connect(self, origin: Origin) -> UpstreamConnection:
        """Name resolution and TLS are part of it. Raises UpstreamConnectError."""
        try:
            async with asyncio.timeout(self._connect_timeout_seconds):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(origin.url, self._keep, self._forget),
                    origin.host,
                    origin.port,
                    ssl=self._tls_context() if origin.is_tls else None,
                )
        except (OSError, UnicodeError) as error:  # a name that cannot be encoded is none
            reason = str(error) or f"not within {self._connect_timeout_seconds:g} s"
            raise UpstreamConnectError(f"cannot connect to {origin.url}: {reason}", "connect") from error
        if not connection.is_lost:
            self._open.add(connection)
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    # Connections that may be used again

    def _take_idle(self, url: str) -> UpstreamConnection | None:
        """The one used last: it is the least likely to be closed by now."""
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if not connection.is_closing and self._loop.time() - connection.idle_since < self._times.keepalive:
                return connection
            connection.close()
        return None

    def _keep(self, connection: UpstreamConnection) -> None:
        connection.idle_since = self._loop.time()
        self._idle.setdefault(connection.url, deque()).append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._times.keepalive, self._sweep)

    def _forget(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.url)
        if idle is not None and connection in idle:
            idle.remove(connection)
        if self._is_closed and not self._open:
            self._all_lost.set()

    def _sweep(self) -> None:
        """One timer for all, not one a connection."""
        now = self._loop.time()
        for url, idle in list(self._idle.items()):
            while idle and now - idle[0].idle_since >= self._times.keepalive:
                idle.popleft().close()
            if not idle:
                del self._idle[url]
        self._sweeper = self._loop.call_later(self._times.sweep, self._sweep) if self._idle else None


def _head(origin: Origin, target: bytes, headers: bytes, num_body_bytes: int) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\n%b\r\n" % (
        target,
        origin.host_header,
        num_body_bytes,
        headers,
    )


@lru_cache(maxsize=4096)
def _origin(url: str) -> Origin:
    try:
        return Origin.parse(url)
    except ValueError as error:
        raise UpstreamConnectError(str(error), "connect") from error
