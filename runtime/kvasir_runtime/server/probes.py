"""What operators, kubelets, routers and Prometheus ask: /health, /ping, /ready, /drain, /migrate, /migrate/request,
/load, /version, /metrics.

Health is progress: an engine that has died, that has work and does not step, or of which a process gives no sign of
life is unhealthy although this process lives.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import Response

import kvasir_runtime
from kvasir_runtime.engine.async_engine import AsyncEngine
from kvasir_runtime.errors import EngineDeadError, ServerUnavailableError
from kvasir_runtime.heartbeat import BEAT_SECONDS, SILENT_SECONDS, Heartbeats
from kvasir_runtime.server.admission import Admission
from kvasir_runtime.server.body import read_names
from kvasir_runtime.server.responses import DrainResponse, LoadResponse, VersionResponse, to_json

HEALTH_PATH, PING_PATH, READY_PATH, LOAD_PATH, METRICS_PATH = "/health", "/ping", "/ready", "/load", "/metrics"
"""`/ping` is `/health` under the name that some hosting platforms ask for."""
PROBE_PATHS = frozenset({HEALTH_PATH, PING_PATH, READY_PATH})
POLLED_PATHS = PROBE_PATHS | {LOAD_PATH, METRICS_PATH}
DRAIN_PATH = "/drain"
MIGRATE_PATH = "/migrate"
"""Has every stream that the router can have continued go on elsewhere."""
MIGRATE_REQUEST_PATH = f"{MIGRATE_PATH}/request"
"""The same of one request. A path of its own: engines that know only the other would move all."""
MIGRATE_PATHS = frozenset({MIGRATE_PATH, MIGRATE_REQUEST_PATH})
_MAX_NAMED_BYTES = 4096


class _NamedRequest(msgspec.Struct, forbid_unknown_fields=True):
    request_id: str
    """Its `x-request-id`."""


@dataclass(frozen=True, slots=True)
class Probes:
    engine: AsyncEngine
    admission: Admission
    registry: CollectorRegistry
    heartbeats: Heartbeats
    stall_seconds: float
    can_migrate: bool
    """Whether other engines can have the KV of requests that leave this one."""
    max_body_seconds: float
    sleep_refusals: Mapping[int, str] = field(default_factory=dict)
    """By level: why it cannot be (`control`)."""

    def check_health(self) -> None:
        """Raises EngineDeadError. A model that is still loading is healthy."""
        if self.engine.dead is not None:
            raise self.engine.dead
        if (silence := self.heartbeats.silence_of_others_seconds()) > SILENT_SECONDS:
            raise EngineDeadError(f"a process of the engine has given no sign of life for {silence:.0f} seconds")
        if self.engine.is_stalled(self.stall_seconds):
            raise EngineDeadError(
                f"the engine has requests, but has finished no step for more than {self.stall_seconds:g} seconds"
            )

    def check_ready(self) -> None:
        """Raises EngineDeadError or ServerUnavailableError."""
        self.check_health()
        self.engine.check_awake()
        if self.engine.ready is None:
            raise ServerUnavailableError("the model is still loading")
        if self.admission.is_draining:
            raise ServerUnavailableError("this server drains")


async def until_hung(check_health: Callable[[], None]) -> None:
    """Until it has failed for as long as a silent process is waited for: what is in flight will not be answered."""
    num_failures = 0
    while num_failures * BEAT_SECONDS < SILENT_SECONDS:
        await asyncio.sleep(BEAT_SECONDS)
        try:
            check_health()
        except EngineDeadError:
            num_failures += 1
        else:
            num_failures = 0


def probe_routes(probes: Probes) -> APIRouter:
    router = APIRouter()

    @router.head(HEALTH_PATH, include_in_schema=False)
    @router.head(PING_PATH, include_in_schema=False)
    @router.get(HEALTH_PATH)
    @router.get(PING_PATH)
    async def health() -> Response:
        probes.check_health()
        return Response()

    @router.head(READY_PATH, include_in_schema=False)
    @router.get(READY_PATH)
    async def ready() -> Response:
        probes.check_ready()
        return Response()

    @router.post(DRAIN_PATH)
    async def start_drain() -> Response:
        probes.admission.refuse()
        return _json(_drain_state(probes))

    @router.get(DRAIN_PATH)
    async def drain_state() -> Response:
        return _json(_drain_state(probes))

    @router.post(MIGRATE_PATH)
    async def migrate() -> Response:
        return _moved(probes, None)

    @router.post(MIGRATE_REQUEST_PATH)
    async def migrate_request(request: Request) -> Response:
        form = '{"request_id": "..."}'
        named = await read_names(request, _NamedRequest, form, _MAX_NAMED_BYTES, probes.max_body_seconds)
        return _moved(probes, named.request_id)

    @router.get(LOAD_PATH)
    async def load() -> Response:
        return _json(_load(probes))

    @router.get("/version")
    async def version() -> Response:
        return _json(VersionResponse(kvasir_runtime.__version__))

    @router.get(METRICS_PATH)
    async def metrics() -> Response:
        # Never as OpenMetrics, which Prometheus asks for first: the library writes `vllm_` there for `vllm:`.
        return Response(generate_latest(probes.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def _moved(probes: Probes, http_request_id: str | None) -> Response:
    if not probes.can_migrate:
        text = "this server exchanges no KV with other engines: its streams end here; see --kv-transfer-config\n"
        return Response(text, status_code=409, media_type="text/plain")
    probes.check_health()
    probes.engine.move_requests(http_request_id)
    return Response(status_code=202)


def _load(probes: Probes) -> LoadResponse:
    ready, stats = probes.engine.ready, probes.engine.stats
    if ready is None or stats is None:
        return LoadResponse(probes.admission.num_in_flight)
    return LoadResponse(
        probes.admission.num_in_flight,
        stats.num_running,
        stats.num_waiting,
        stats.waiting_uncached_tokens,
        stats.running_uncached_tokens,
        stats.kv_used_tokens,
        stats.kv_capacity_tokens,
        stats.steps_per_second,
        stats.prefill_tokens_per_second,
        ready.instance,
        ready.max_model_len,
        ready.max_model_len_cut_from,
    )


def _drain_state(probes: Probes) -> DrainResponse:
    """Blocks that are kept for other engines are work as well: those engines still have to read them."""
    stats = probes.engine.stats
    leased = 0 if stats is None or stats.transfers is None else stats.transfers.num_leased_blocks
    return DrainResponse(probes.admission.is_draining, probes.admission.num_in_flight, leased)


def _json(value: DrainResponse | LoadResponse | VersionResponse) -> Response:
    return Response(to_json(value), media_type="application/json")
