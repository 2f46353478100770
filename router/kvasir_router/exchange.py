"""The client's side of one request: what was sent back so far, and how to end it well whatever happened upstream."""

import uuid
from collections.abc import Iterable

from starlette.types import Scope, Send

from kvasir_router.errors import RequestError
from kvasir_router.journal import RESUMABLE_HEADER, Journal

RawHeaders = Iterable[tuple[bytes, bytes]]

# RFC 9110 section 7.6.1: these concern one connection, not the message.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)


_NOT_RELAYED = HOP_BY_HOP | {RESUMABLE_HEADER.encode()}
_END_OF_STREAM = b"data: [DONE]\n\n"


class Exchange:
    """`last_chunk` is set by whoever relays, so that a broken stream can be ended between two events.

    `journal` too: what another engine needs to continue the stream; None where the answer cannot be continued.
    """

    def __init__(self, scope: Scope, send: Send, arrived: float) -> None:
        path, query = scope["path"], scope["query_string"].decode("latin-1")
        self.send = send
        self.arrived = arrived
        self.path: str = f"{path}?{query}" if query else path  # as an engine knows it, however the client wrote it
        self.announced_bytes = int(_header(scope, b"content-length") or 0)  # of the request's body
        self.request_id = _header(scope, b"x-request-id") or uuid.uuid4().hex
        self.has_started = False
        self.is_event_stream = False
        self.last_chunk = b""
        self.journal: Journal | None = None

    @property
    def can_go_elsewhere(self) -> bool:
        """Another endpoint could still give the answer, or the rest of it."""
        return not self.has_started or (self.journal is not None and not self.journal.is_too_long)

    @property
    def has_whole_stream(self) -> bool:
        """The client has the last event; what becomes of the connection it came by does not matter."""
        return self.last_chunk.endswith(_END_OF_STREAM)

    async def start(self, status: int, raw_headers: RawHeaders) -> None:
        """Sends status and headers as they came, hop-by-hop headers apart, with the request's id."""
        headers = [(name.lower(), value) for name, value in raw_headers]
        headers = [header for header in headers if header[0] not in _NOT_RELAYED]
        names = dict(headers)
        if b"x-request-id" not in names:
            headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        self.is_event_stream = names.get(b"content-type", b"").startswith(b"text/event-stream")
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        self.has_started = True  # only now: a send that is interrupted has written nothing

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})

    async def fail(self, error: RequestError) -> None:
        """An OpenAI error as answer, or as the last event of a stream.

        Any other answer that has begun cannot be mended: it stays unfinished, and the server closes the connection.
        """
        if not self.has_started:
            await self._answer(error)
        elif self.is_event_stream:
            separator = b"" if self.last_chunk.endswith(b"\n\n") else b"\n\n"
            event = separator + b"data: " + error.body() + b"\n\n"
            await self.send({"type": "http.response.body", "body": event})

    async def _answer(self, error: RequestError) -> None:
        body = error.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if error.retry_after_seconds is not None:
            headers.append((b"retry-after", str(error.retry_after_seconds).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.start(error.status, headers)
        await self.send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)
