"""Probes, metrics, what is known of each endpoint, and a page about routing, on a port of their own."""

import time
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from kvasir_router.debug.decisions import DecisionLog
from kvasir_router.debug.routing import PAGE, PAGE_HEADERS, describe_routing
from kvasir_router.metrics import Metrics
from kvasir_router.service.service import Services


def create_admin_app(
    services: Services, metrics: Metrics, decisions: DecisionLog, is_ready: Callable[[], bool]
) -> Starlette:
    """/ready holds once the router listens and knows its endpoints, even if there are none: it then holds requests, and
    taking it out of its Service while engines start from zero would refuse them instead.
    """

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        if is_ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready: starting, endpoints not read yet, or shutting down"}, 503)

    async def series(request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def endpoints(request: Request) -> Response:
        return JSONResponse(services.describe())

    async def page(request: Request) -> Response:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def routing(request: Request) -> Response:
        service = request.query_params.get("service")
        return JSONResponse(describe_routing(services, decisions, service, time.perf_counter(), time.time()))

    pages = {
        "/health": health,
        "/ready": ready,
        "/metrics": series,
        "/endpoints": endpoints,
        "/debug/routing": page,
        "/debug/routing.json": routing,
    }

    async def unknown(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": f"there is no {request.url.path} here, but {', '.join(pages)}"}, 404)

    return Starlette(routes=[Route(path, answer) for path, answer in pages.items()], exception_handlers={404: unknown})
