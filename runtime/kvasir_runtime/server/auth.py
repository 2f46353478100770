"""The API key: with one set, every route but the probes asks for it, also routes that do not exist."""

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir_runtime.server.errors import AuthenticationError, error_response
from kvasir_runtime.server.probes import MIGRATE_PATHS
from kvasir_runtime.server.tokenizer_description import TOKENIZER_PATH

OPEN_PATHS = frozenset({"/health", "/ready", TOKENIZER_PATH}) | MIGRATE_PATHS
"""What the kubelet calls, which has no key, and what the router proves itself for in another way (`router_trust`)."""


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
        await error_response(error)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(key.strip().encode(), self._api_key)
