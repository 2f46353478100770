"""What stands around the routes, from the outside in: the log with its ids, who may ask for what, what is let in.

Every request has an id, which its answer repeats, and a line in the log: at info where it is refused, else at debug.
That stands around everything else, so that no answer goes out without. What probes ask, again and again, is logged at
debug alone.

With an API key set, every route but the probes asks for it, also routes that do not exist. Only the router may name a
tenant, ask for a journal, hand one over, have streams leave or the server drain, abort requests, have cached prefixes
forgotten, send the engine to sleep, get the tokenizer, and say whom KV is exchanged with.

With KVASIR_ROUTER_SECRET in the environment the router proves itself by a header; without one, a peer on this machine
is believed. From anyone else the tenant and the wish for a journal are dropped, so the request is served as any
client's; a journal is refused, because what is behind the client's own body cannot be told apart from it, and so are
the tokenizer, which may be a model's own, a drain, which nothing takes back, and `kv_transfer_params`. Those alone are
taken from anyone with --kv-transfer-trust-clients, for routers of other makes.
"""

import ipaddress
import logging
import secrets
import time
import uuid
from collections.abc import Set

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir_runtime.errors import ServerUnavailableError
from kvasir_runtime.request_metrics import RequestMetrics
from kvasir_runtime.server.admission import Admission, BodyBudget
from kvasir_runtime.server.control import CONTROL_PATHS
from kvasir_runtime.server.errors import (
    ANTHROPIC_PATHS,
    CLIENT_CLOSED_REQUEST,
    AuthenticationError,
    NotTheRouterError,
    error_response,
    worded_response,
)
from kvasir_runtime.server.journal import JOURNAL_HEADER, RESUMABLE_HEADER
from kvasir_runtime.server.probes import DRAIN_PATH, MIGRATE_PATHS, PROBE_PATHS
from kvasir_runtime.server.resolving import STRANGER, TENANT_HEADER
from kvasir_runtime.server.tokenizer_description import TOKENIZER_PATH
from kvasir_runtime.service_secret import SECRET_VARIABLE

logger = logging.getLogger(__name__)
REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID = "kvasir.request_id"
"""In the ASGI scope."""
MAX_REQUEST_ID_CHARS = 256
SECRET_HEADER = "x-kvasir-router-secret"
_DROPPED = frozenset(name.encode() for name in (TENANT_HEADER, RESUMABLE_HEADER, JOURNAL_HEADER))
OPEN_PATHS = PROBE_PATHS | {TOKENIZER_PATH} | MIGRATE_PATHS | CONTROL_PATHS
"""What the kubelet calls, which has no key, and what the router proves itself for in another way."""


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
                "%s %s %d %.3fs %s",
                scope["method"],
                scope.get("raw_path", b"").decode("latin-1"),
                status,
                seconds,
                " ".join(error.split()),
                extra={"request_id": request_id, "status": status},
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


class ApiKeyMiddleware:
    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError(
            "the request has no valid API key; send the header 'Authorization: Bearer KEY' with this server's key"
        )
        await worded_response(error, scope["path"])(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        """As OpenAI's clients send it, or as Anthropic's do."""
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        key = bearer if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return secrets.compare_digest(key.strip().encode(), self._api_key)


class RouterTrustMiddleware:
    def __init__(self, app: ASGIApp, secret: str | None, *, kv_transfer_trust_clients: bool = False) -> None:
        """`secret` None: peers on this machine are believed. `kv_transfer_trust_clients`: by `kv_transfer_params`."""
        self._app = app
        self._secret = None if secret is None else secret.encode()
        self._stranger = {} if kv_transfer_trust_clients else {STRANGER: True}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_from_router(scope):
            await self._app(scope, receive, send)
        elif JOURNAL_HEADER in Headers(scope=scope):
            await _refused(f"{JOURNAL_HEADER}: only the router may continue a stream")(scope, receive, send)
        elif scope["path"] == TOKENIZER_PATH:
            await _refused(f"{TOKENIZER_PATH}: only the router may ask for the tokenizer")(scope, receive, send)
        elif scope["path"] in MIGRATE_PATHS:
            await _refused(f"{scope['path']}: only the router can have streams go on elsewhere")(scope, receive, send)
        elif scope["path"] in CONTROL_PATHS:
            await _refused(f"{scope['path']}: only the router can have the engine do this")(scope, receive, send)
        elif scope["path"] == DRAIN_PATH and scope["method"] == "POST":
            await _refused(f"{DRAIN_PATH}: only the router can have this server drain")(scope, receive, send)
        else:
            headers = [header for header in scope["headers"] if header[0] not in _DROPPED]
            await self._app({**scope, **self._stranger, "headers": headers}, receive, send)

    def _is_from_router(self, scope: Scope) -> bool:
        if self._secret is None:
            return scope["client"] is not None and is_loopback(scope["client"][0])
        given = Headers(scope=scope).get(SECRET_HEADER, "")
        return secrets.compare_digest(given.encode(), self._secret)


def _refused(what: str) -> Response:
    return error_response(
        NotTheRouterError(
            f"{what}; it sends {SECRET_HEADER} with the value of {SECRET_VARIABLE}, which both must be started with"
        )
    )


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback  # how a dual-stack socket sees IPv4
    return address.is_loopback


class AdmissionMiddleware:
    """Around the routes of these paths, which the engine works for, until the last byte of the answer is out."""

    def __init__(self, app: ASGIApp, admission: Admission, paths: Set[str]) -> None:
        self._app = app
        self._admission = admission
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        try:
            with self._admission.admit():
                await self._app(scope, receive, send)
        except ServerUnavailableError as error:
            await worded_response(error, scope["path"])(scope, receive, send)


class BodyBudgetMiddleware:
    """Counts what is received, within the place where errors become answers. What is sent passes it by."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_taken = 0

        async def receive_within_budget() -> Message:
            nonlocal num_taken
            message = await receive()
            if num_bytes := len(message.get("body", b"")):
                self._budget.take(num_bytes)
                num_taken += num_bytes
            return message

        try:
            await self._app(scope, receive_within_budget, send)
        finally:
            self._budget.give_back(num_taken)
