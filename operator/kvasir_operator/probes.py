"""The operator's HTTP server: `/metrics`, `/healthz` (fails: restart it) and `/readyz` (it works, or stands by)."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvasir_operator.errors import KvasirOperatorError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Check = Callable[[], str | None]
"""Returns what is wrong; None when nothing is."""


@asynccontextmanager
async def serving_probes(
    host: str, port: int, registry: CollectorRegistry, alive: Check, ready: Check
) -> AsyncIterator[int]:
    """Serves until left; yields the port (`port` 0 takes a free one). Raises KvasirOperatorError for a port in use."""
    app = web.Application()
    app.router.add_get("/metrics", _metrics(registry))
    app.router.add_get("/healthz", _probe(alive))
    app.router.add_get("/readyz", _probe(ready))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await _start(site, host, port)
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _start(site: web.TCPSite, host: str, port: int) -> None:
    try:
        await site.start()
    except OSError as error:
        raise KvasirOperatorError(
            f"cannot serve metrics and probes on {host}:{port}: {error.strerror}; choose others with --host and --port"
        ) from error


def _metrics(registry: CollectorRegistry) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return handle


def _probe(check: Check) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        trouble = check()
        return web.Response(text=trouble or "ok", status=503 if trouble else 200)

    return handle
