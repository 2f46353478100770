"""Every request has an id, which its answer repeats, and a line in the log: at info where it is refused, else at debug.

Around everything else, so that no answer goes out without. What probes ask, again and again, is logged at debug alone.
"""

import logging
import time
import uuid
from collections.abc import Set

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir_runtime.request_metrics import RequestMetrics

logger = logging.getLogger(__name__)
REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID = "kvasir.request_id"
"""In the ASGI scope."""
ANTHROPIC_PATHS = "/v1/messages"
MAX_REQUEST_ID_CHARS = 256
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for an answer that nobody waits for; only logs see it."""


class RequestLog:
    def __init__(self, app: ASGIApp, metrics: RequestMetrics, probe_paths: Set[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._probe_paths = probe_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or uuid.uuid4().hex
        status, error = CLIENT_CLOSED_REQUEST, ""

        async def send_with_id(message: Message) -> None:
            nonlocal status, error
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(name, request_id.encode("latin-1")) for name in _headers_for(scope["path"])]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            elif status >= 400:
                error = _error_in(message.get("body", b""))
            await send(message)

        start = time.monotonic()
        try:
            await self._app({**scope, REQUEST_ID: request_id}, receive, send_with_id)
        finally:
            seconds = time.monotonic() - start
            self._metrics.answered(scope["path"], status, seconds)
            is_worth_a_line = status >= 400 and scope["path"] not in self._probe_paths
            logger.log(
                logging.INFO if is_worth_a_line else logging.DEBUG,
                "%s %s %d %.3fs request_id=%s %s",
                scope["method"],
                scope.get("raw_path", b"").decode("latin-1"),
                status,
                seconds,
                request_id,
                " ".join(error.split()),
            )


def _headers_for(path: str) -> tuple[bytes, ...]:
    """Anthropic's clients look for another one."""
    own = REQUEST_ID_HEADER.encode()
    return (own, b"request-id") if path.startswith(ANTHROPIC_PATHS) else (own,)


def _given_id(scope: Scope) -> str | None:
    """None where it is longer than any that a router would draw, or would break a line."""
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isprintable() else None


class _Told(msgspec.Struct):
    message: str


class _Answer(msgspec.Struct):
    """Of an error, in every API's words."""

    error: _Told


def _error_in(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Answer).error.message
    except msgspec.DecodeError:
        return ""
