"""Requests that are forwarded, handled as bytes without ASGI: one task each, cancelled the moment that the connection
is lost. Everything else goes to the application as uvicorn has it.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httptools

from kvasir_http.connections import Connections
from kvasir_http.http_protocol import BoundedHttpProtocol
from kvasir_router.dialects.dialect import Dialect
from kvasir_router.relay.body import CLIENT_TIMES, Body, BodyBudget, ClientTimes
from kvasir_router.relay.exchange import Exchange, ResponseWriter
from kvasir_router.relay.ollama import PATHS as OLLAMA_PATHS
from kvasir_router.relay.ollama import OllamaWriter


@dataclass(frozen=True)
class Forwarding:
    """Which requests are handled as bytes, by whom, and how large they may be."""

    dialects: Mapping[str, Dialect]  # by path; POST alone
    handle: Callable[[Exchange], Awaitable[None]]
    bodies: BodyBudget
    max_body_bytes: int
    cors_origins: Set[bytes] = frozenset()


class ForwardingHttpProtocol(BoundedHttpProtocol):
    """One connection. `forwarding` None: a server that forwards nothing."""

    overload_type = "server_error"

    def __init__(
        self,
        *,
        connections: Connections,
        forwarding: Forwarding | None = None,
        limits: ClientTimes = CLIENT_TIMES,
        **uvicorns: Any,
    ) -> None:
        super().__init__(connections=connections, limits=limits, **uvicorns)
        self._server_connections = connections
        self._forwarding = forwarding
        self._times = limits

    # How a request is handled

    def make_request(self) -> Any:
        return self._exchange() or super().make_request()

    def begin(self, request: Any) -> None:
        if isinstance(request, Exchange):
            task = self.loop.create_task(self._handle(request))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
            request.begin(task, time.perf_counter())
            return
        super().begin(request)

    def give_up(self, request: Any) -> None:
        if isinstance(request, Exchange):
            request.leave()
        else:
            super().give_up(request)

    def has_started(self, request: Any) -> bool:
        return request.has_head if isinstance(request, Exchange) else super().has_started(request)

    def close_after(self, request: Any) -> None:
        if isinstance(request, Exchange):
            request.close_connection_after()
        else:
            super().close_after(request)

    def _exchange(self) -> Exchange | None:
        """None for what is not forwarded. A slash at the end of a path means nothing, and no engine sees it."""
        forwarding, parser = self._forwarding, self.parser
        if forwarding is None or parser.get_method() != b"POST":
            return None
        path, query = path_and_query(self.url)
        is_ollama = path in OLLAMA_PATHS
        path = OLLAMA_PATHS.get(path, path)
        dialect = forwarding.dialects.get(path)
        if dialect is None:
            return None
        version = parser.get_http_version()
        writer = (OllamaWriter if is_ollama else ResponseWriter)(
            self.transport,
            self._server_connections,
            self.on_response_complete,
            takes_chunks=version == "1.1",
            keeps_alive=version != "1.0" and parser.should_keep_alive(),
        )
        return Exchange(
            f"{path}?{query}" if query else path,
            self.headers,
            dialect,
            Body(forwarding.bodies, forwarding.max_body_bytes, self.num_body_bytes_left, self._times),
            writer,
            forwarding.cors_origins,
            writer.translated if isinstance(writer, OllamaWriter) else None,
        )

    async def _handle(self, exchange: Exchange) -> None:
        assert self._forwarding is not None
        try:
            await self._forwarding.handle(exchange)
        finally:
            if not exchange.has_ended:
                self.transport.close()  # which tells the client that there is a rest

    # What the client sends and takes

    def take_body(self, body: bytes) -> None:
        if isinstance(self.receiving, Exchange):
            self.receiving.body.feed(body)
        else:
            super().take_body(body)

    def end_body(self) -> None:
        if isinstance(self.receiving, Exchange):
            self.receiving.body.end()
        else:
            super().end_body()

    def pause_writing(self) -> None:
        super().pause_writing()
        if (exchange := self._answering()) is not None:
            exchange.hold_back()

    def resume_writing(self) -> None:
        if (exchange := self._answering()) is not None:
            exchange.go_on()
        super().resume_writing()

    def _answering(self) -> Exchange | None:
        first = self.unanswered[0] if self.has_begun and self.unanswered else None
        return first if isinstance(first, Exchange) else None


def path_and_query(target: bytes) -> tuple[str, str]:
    """The path without escapes, as uvicorn has it, and without slashes at its end."""
    url = httptools.parse_url(target)
    path = url.path.decode("ascii")
    if "%" in path:
        path = unquote(path)
    return path.rstrip("/"), (url.query or b"").decode("latin-1")
