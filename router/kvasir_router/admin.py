"""Probes, metrics, what is known of each endpoint, and a page about routing, on a port of their own."""

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute

from kvasir_router.debug.decisions import DecisionLog
from kvasir_router.debug.routing import PAGE, PAGE_HEADERS, describe_routing
from kvasir_router.metrics import Metrics
from kvasir_router.service.service import Services


def create_admin_app(
    services: Services, metrics: Metrics, decisions: DecisionLog, is_ready: Callable[[], bool]
) -> FastAPI:
    """/ready holds once the router listens and knows its endpoints, even if there are none: it then holds requests, and
    taking it out of its Service while engines start from zero would refuse them instead.
    """
    app = FastAPI(title="Kvasir router admin", openapi_url=None)

    @app.exception_handler(404)
    async def unknown(request: Request, error: Exception) -> Response:
        paths = ", ".join(route.path for route in app.routes if isinstance(route, APIRoute))
        return JSONResponse({"detail": f"there is no {request.url.path} here, but {paths}"}, 404)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(response: Response) -> dict[str, str]:
        response.status_code = 200 if is_ready() else 503
        return {"status": "ready" if is_ready() else "not ready: starting, endpoints not read yet, or shutting down"}

    @app.get("/metrics")
    async def series() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/endpoints")
    async def endpoints() -> list[dict[str, Any]]:
        return services.describe()

    @app.get("/debug/routing")
    async def routing_page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    @app.get("/debug/routing.json")
    async def routing(service: str | None = None) -> dict[str, Any]:
        return describe_routing(services, decisions, service, time.perf_counter(), time.time())

    return app
