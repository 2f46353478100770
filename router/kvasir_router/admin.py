"""Probes, metrics and the fleet's picture, on a port of their own."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Response

from kvasir_router.fleet import Fleet
from kvasir_router.metrics import Metrics


def create_admin_app(fleet: Fleet, metrics: Metrics, is_ready: Callable[[], bool]) -> FastAPI:
    """/ready holds once the router listens and knows its endpoints, even if there are none: it then holds requests, and
    taking it out of its Service while engines start from zero would refuse them instead.
    """
    app = FastAPI(title="Kvasir router admin", openapi_url=None)

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
        return fleet.describe()

    return app
