"""The admin port of a router of several workers: probes and metrics of all of them, and pages of one at a time."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvasir_router.debug.routing import PAGE, PAGE_HEADERS
from kvasir_router.fleet_series import FleetSeries

# A worker whose event loop does not turn for so long is no better than none.
_ANSWER_SECONDS = 2.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


_SEEN_BY_ALL = frozenset(FleetSeries)
# When a worker began to count is nothing that can be added up.
_CREATED = "_created"

_Labels = tuple[tuple[str, str], ...]


@dataclass
class _Series:
    """The series of several workers as those of one router. Pure: text in, text out.

    Counts and what is held are added up; what every worker sees of the same engines is told once, as the most of them.
    """

    text: str
    kind: str
    values: dict[tuple[str, _Labels], float] = field(default_factory=dict)
    """By the sample's name and labels, in their first order."""


def combined(expositions: Sequence[str]) -> bytes:
    """In Prometheus' text format, as each of `expositions` is."""
    registry = CollectorRegistry()
    registry.register(_Combined(expositions))
    return generate_latest(registry)


class _Combined(Collector):
    def __init__(self, expositions: Iterable[str]) -> None:
        self._series: dict[str, _Series] = {}
        for exposition in expositions:
            for metric in text_string_to_metric_families(exposition):
                if not metric.name.endswith(_CREATED):
                    self._add(metric)

    def collect(self) -> Iterator[Metric]:
        for name, series in self._series.items():
            metric = Metric(name, series.text, series.kind)
            for (sample, labels), value in series.values.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric

    def _add(self, metric: Metric) -> None:
        series = self._series.setdefault(metric.name, _Series(metric.documentation, metric.type))
        for sample in metric.samples:
            key = sample.name, tuple(sample.labels.items())
            before = series.values.get(key, 0.0)
            is_same = metric.name in _SEEN_BY_ALL
            series.values[key] = max(before, sample.value) if is_same else before + sample.value


class WorkerAdmins:
    """Where the workers that serve tell about themselves. To be used as a context."""

    def __init__(self) -> None:
        self._urls: dict[int, str] = {}

    async def __aenter__(self) -> "WorkerAdmins":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def serves(self, number: int, url: str) -> None:
        self._urls[number] = url

    def ended(self, number: int) -> None:
        self._urls.pop(number, None)

    async def get_all(self, path: str) -> list[tuple[int, bytes]]:
        """Statuses and bodies, of those that serve; 503 for one that does not answer."""
        return await asyncio.gather(*(self._get(url + path) for url in self._urls.values()))

    async def get_one(self, number: int, path: str) -> tuple[int, bytes]:
        """404 where no such worker serves."""
        url = self._urls.get(number)
        return (404, b'{"detail": "no such worker serves now"}') if url is None else await self._get(url + path)

    async def _get(self, url: str) -> tuple[int, bytes]:
        try:
            async with self._session.get(url) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return 503, str(error).encode()


def create_supervisor_app(
    admins: WorkerAdmins, is_serving: Callable[[], bool], all_start: Callable[[], bool]
) -> FastAPI:
    """/ready holds while some worker is ready, /health while each that serves answers and none fails to start: a new
    pod may do better. What one worker alone can tell (/endpoints, /debug/routing) is asked of worker 0, or of
    `?worker=N`.
    """
    app = FastAPI(title="Kvasir router admin", openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        found = await admins.get_all("/health")
        return Response(status_code=200 if all_start() and all(status == 200 for status, _ in found) else 503)

    @app.get("/ready")
    async def ready() -> Response:
        found = await admins.get_all("/ready")
        return Response(status_code=200 if is_serving() and any(status == 200 for status, _ in found) else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        found = await admins.get_all("/metrics")
        return Response(combined([body.decode() for status, body in found if status == 200]), media_type=_METRICS_TYPE)

    @app.get("/endpoints")
    @app.get("/debug/routing.json")
    async def of_one(request: Request, worker: int = 0) -> Response:
        status, body = await admins.get_one(worker, f"{request.url.path}?{request.url.query}")
        return Response(body, status, media_type="application/json")

    @app.get("/debug/routing")
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    return app
