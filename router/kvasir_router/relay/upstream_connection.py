"""HTTP/1.1 towards one engine: a request is written, its answer parsed, and the connection kept for the next.

An engine is a program of its own and may be of any make: what it sends has bounds, and whatever is no answer ends the
connection by name. The pool owns connections; an answer is whoever's has asked for it.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import cast

import httptools

from kvasir_router.errors import UpstreamBrokenError, UpstreamError, UpstreamLostError, UpstreamMalformedError
from kvasir_router.relay.headers import RawHeaders
from kvasir_router.relay.upstream_answer import UpstreamAnswer

MAX_HEAD_BYTES = 64 * 1024
"""Of headers; also of trailers, chunk extensions and what else the parser takes in without a word."""
MAX_HEADERS = 256
"""Trailers included."""
_WITHOUT_BODY = frozenset({204, 304})
# Of a request: to copy so few is quicker than to write its parts.
_COPIED_BYTES = 64 * 1024
_VERSIONS = ("1.1", "1.0")

# A node that has vanished says nothing, and nothing is what a stream says between two tokens. So the kernels ask each
# other: after 10 s of silence, every 5 s; three times in vain, or 25 s without an acknowledgement, are the end.
_PROBES = tuple(
    (level, getattr(socket, option), value)
    for level, option, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 10),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 25_000),
    )
    if hasattr(socket, option)  # not every system has them all
)


class UpstreamConnection(asyncio.Protocol):
    """`on_idle` is called whenever the connection may be used again, `on_lost` once, at its end."""

    def __init__(
        self,
        url: str,
        on_idle: Callable[["UpstreamConnection"], None],
        on_lost: Callable[["UpstreamConnection"], None],
    ) -> None:
        self.url = url
        self.idle_since = 0.0
        self.is_silent = True  # nothing has come since the last request
        self.has_been_heard = False  # since somebody last asked
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._parser = httptools.HttpResponseParser(self)
        self._answer: UpstreamAnswer | None = None  # under way
        self.is_lost = False
        self._expect_answer()

    def _expect_answer(self) -> None:
        self.is_silent = True
        self._has_head = False
        self._has_body = False  # some of it
        self._is_answered = False
        self._can_be_kept = True
        self._ends_with_connection = False
        self._num_headers = 0
        self._num_head_bytes = 0
        self._num_unparsed_bytes = 0  # that the parser has taken in since it last said anything
        self._body: list[bytes] = []  # of one read
        self._is_after_chunk = False  # the parser is, as far as it has read
        self._is_between_chunks = False  # what comes next begins one

    # For the pool

    @property
    def is_closing(self) -> bool:
        return self.is_lost or self._transport.is_closing()

    def send(self, request: Sequence[bytes], num_bytes: int, answer: UpstreamAnswer) -> None:
        """One at a time; `num_bytes` are those of all parts. Where the connection is lost by now, the answer fails."""
        self._expect_answer()
        if self.is_closing:
            answer.fail(self._lost(None))
            return
        self._answer = answer
        if num_bytes > _COPIED_BYTES:
            self._transport.writelines(request)
        else:
            self._transport.write(b"".join(request))

    def close(self) -> None:
        self._transport.close()

    # For the answer, as long as it is under way

    def pause_reading(self) -> None:
        if not self.is_closing:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing:
            self._transport.resume_reading()

    def abort(self) -> None:
        self._answer = None
        if not self.is_lost:
            self._transport.abort()

    # For the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _probe_when_silent(transport)

    def data_received(self, data: bytes) -> None:
        self.has_been_heard = True
        answer = self._answer
        if answer is None:  # nobody has asked
            self.abort()
            return
        if self._is_between_chunks and (begin := _begin_of_only_chunk(data)):
            answer.feed_chunk(data, begin)  # which leaves the parser where it is
            return
        self.is_silent = False
        self._num_unparsed_bytes += len(data)
        malformation: BaseException | None = None
        try:
            self._parser.feed_data(data)
            if self._num_unparsed_bytes > MAX_HEAD_BYTES:
                malformation = _too_large()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            malformation = error.__context__ or error
        if self._body:  # one piece a read, however many chunks it was cut into
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            self._has_body = True
            answer.feed(body)
        self._is_between_chunks = self._is_after_chunk and data.endswith(b"\r\n")
        if malformation is not None and not self._is_answered:
            self._refuse(answer, malformation)
        elif self._is_answered:
            self._finish(answer, is_clean=malformation is None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._on_lost(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if self._ends_with_connection and exc is None:
            answer.end()
        else:
            answer.fail(self._lost(exc))

    # For the parser

    def on_message_begin(self) -> None:
        if self._is_answered:
            raise _NoAnswerError("another answer follows it, for which nobody has asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_head_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._num_head_bytes > MAX_HEAD_BYTES:
            raise _too_large()
        if self._answer is not None and not self._has_head:  # a trailer is for nobody
            self._answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        if answer is None:
            return
        version = self._parser.get_http_version()
        if status < 100 or status == 101 or version not in _VERSIONS:
            raise _NoAnswerError(f"status {status} of HTTP/{version}, which answers nothing")
        if status < 200:
            answer.headers.clear()  # of an interim answer; another follows
            return
        self._has_head = True
        self._num_unparsed_bytes = 0
        self._ends_with_connection = status not in _WITHOUT_BODY and not _tells_its_length(answer.headers)
        answer.status = status

    def on_body(self, body: bytes) -> None:
        self._num_unparsed_bytes = 0
        self._body.append(body)

    def on_chunk_header(self) -> None:
        self._is_after_chunk = False

    def on_chunk_complete(self) -> None:
        self._is_after_chunk = True

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_answered = True
            self._can_be_kept = self._parser.should_keep_alive()

    # What came of it

    def _finish(self, answer: UpstreamAnswer, *, is_clean: bool) -> None:
        if self._answer is not answer:  # given up by whoever has just read its end
            return
        self._answer = None
        answer.end()
        # An engine may answer before it has read the request, whose rest it would then take for the next.
        has_been_read = not self._transport.get_write_buffer_size()
        if is_clean and self._can_be_kept and has_been_read and not self.is_closing:
            self._transport.resume_reading()
            self._on_idle(self)
        else:
            self._transport.close()

    def _refuse(self, answer: UpstreamAnswer, malformation: BaseException) -> None:
        self.abort()
        message = f"{self.url} sent what is no HTTP/1.1 answer: {malformation}"
        kind = UpstreamBrokenError if self._has_body else UpstreamMalformedError
        answer.fail(kind(message, "malformed"))

    def _lost(self, exc: Exception | None) -> UpstreamError:
        why = "" if exc is None else f": {exc}"
        if self._has_body:
            message = f"the engine {self.url} stopped in the middle of its answer{why}; what came so far is incomplete"
            return UpstreamBrokenError(message, "broken")
        return UpstreamLostError(f"{self.url} closed the connection before it answered{why}", "lost")


class _NoAnswerError(Exception):
    """Raised into the parser, which gives up."""


def _begin_of_only_chunk(data: bytes) -> int:
    """Of the body of the one chunk that `data` is, its size written as short as can be; 0: it is anything else."""
    begin = data.find(b"\r\n", 1, 10) + 2
    num_bytes = len(data) - begin - 2
    is_chunk = num_bytes > 0 and data.startswith(b"%x\r\n" % num_bytes) and data.endswith(b"\r\n")
    return begin if is_chunk else 0


def _too_large() -> _NoAnswerError:
    return _NoAnswerError(f"its head is too large; it may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers")


def _tells_its_length(headers: RawHeaders) -> bool:
    """Raises where the body is in a transfer coding that nobody here has offered to undo."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        raise _NoAnswerError(f"transfer-encoding {b', '.join(codings)!r}; send it chunked or with a content-length")
    return bool(codings) or any(name == b"content-length" for name, _ in headers)


def _probe_when_silent(transport: asyncio.BaseTransport) -> None:
    descriptor = transport.get_extra_info("socket").fileno()
    # uvloop's own stand-in for a socket makes a real one for every option.
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        for level, option, value in _PROBES:
            connection.setsockopt(level, option, value)
    finally:
        connection.detach()
