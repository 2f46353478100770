"""The operator's HTTP server: `/metrics`, `/healthz` (fails: restart it) and `/readyz` (it works, or stands by).

`/metrics?name[]=SERIES` gives those series alone, as prometheus_client's own server does: those of 1,000 services take
80 ms to write down.
"""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvasir_operator.errors import KvasirOperatorError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Check = Callable[[], str | None]
"""Returns what is wrong; None when nothing is."""


@asynccontextmanager
async def serving_probes(
    host: str, port: int, registry: CollectorRegistry, alive: Check, ready: Check
) -> AsyncIterator[str]:
    """Serves until left; yields `ADDRESS:PORT` (`port` 0 takes a free one).

    Raises KvasirOperatorError for an address that cannot be had.
    """
    app = web.Application()
    app.router.add_get("/metrics", _metrics(registry))
    app.router.add_get("/healthz", _probe(alive))
    app.router.add_get("/readyz", _probe(ready))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    with closing(_listening(host, port)) as listener:
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            address = listener.getsockname()
            yield _text(address[0], address[1])
        finally:
            await runner.cleanup()


def _listening(host: str, port: int) -> socket.socket:
    """`::` is every address, IPv6 and IPv4; asyncio's own sockets would take it for IPv6 alone."""
    try:
        if host != "::":
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("0.0.0.0", port))  # a kernel without IPv6
    except OSError as error:
        raise KvasirOperatorError(
            f"cannot serve metrics and probes on {_text(host, port)}: {error.strerror}; "
            "choose others with --host and --port"
        ) from error


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _metrics(registry: CollectorRegistry) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        names = request.query.getall("name[]", [])
        asked = registry.restricted_registry(names) if names else registry
        return web.Response(body=generate_latest(asked), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return handle


def _probe(check: Check) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        trouble = check()
        return web.Response(text=trouble or "ok", status=503 if trouble else 200)

    return handle
