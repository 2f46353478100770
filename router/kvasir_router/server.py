"""Kvasir's router: builds its parts from the configuration, runs them, and takes them down in order.

Start: sockets, parts, endpoint source, servers. Stop: no new connections, the requests of those that are there to their
end, then the rest.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from kvasir_router import proxy
from kvasir_router.admin import create_admin_app
from kvasir_router.admission import Admission
from kvasir_router.api_keys import ApiKeys
from kvasir_router.app import Handler, Limits, Parts
from kvasir_router.body import BodyBudget
from kvasir_router.config import PolicyName, RouterConfig, router_secret_of
from kvasir_router.connections import ConnectionLimits, Connections, possible_connections
from kvasir_router.endpoints.endpoint import Address
from kvasir_router.endpoints.kubernetes import KubernetesSource, ServiceReference, SliceApi
from kvasir_router.endpoints.static import StaticSource
from kvasir_router.fleet import EndpointState, Fleet
from kvasir_router.health import Prober
from kvasir_router.http_protocol import BoundedHttpProtocol
from kvasir_router.last_answers import LastAnswers
from kvasir_router.listener import listening, url_of
from kvasir_router.metrics import Metrics
from kvasir_router.models import ModelCatalog
from kvasir_router.picker import Picker
from kvasir_router.policies import Policy
from kvasir_router.policies.finish_time import FinishTime
from kvasir_router.policies.round_robin import RoundRobin
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.request import PromptSettings
from kvasir_router.routes import create_app

logger = logging.getLogger(__name__)

_POLICIES: dict[PolicyName, type[Policy]] = {"finishTime": FinishTime, "roundRobin": RoundRobin}
_HOUSEKEEPING_SECONDS = 10.0
_CLIENT_KEEPALIVE_SECONDS = 75
# Probes, scrapes, and somebody who looks.
_ADMIN_CONNECTIONS = ConnectionLimits(total=256, per_peer=64)

Source = StaticSource | KubernetesSource


@dataclass
class RunningRouter:
    """Base URLs and the parts that tell what is going on."""

    url: str
    admin_url: str
    fleet: Fleet
    admission: Admission
    metrics: Metrics
    is_stopping: bool = False


def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises StartupError."""
    router_secret = router_secret_of(os.environ)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_signal(config, router_secret))


async def _serve_until_signal(config: RouterConfig, router_secret: str | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config, router_secret=router_secret) as router:
        logger.info("serving on %s, probes and metrics on %s", router.url, router.admin_url)
        await stop.wait()
        logger.info("stopping: running requests get up to %g s", config.shutdown_timeout)


@contextlib.asynccontextmanager
async def running(
    config: RouterConfig, slice_api: SliceApi | None = None, router_secret: str | None = None
) -> AsyncIterator[RunningRouter]:
    """A router that serves while the block runs and drains at its end. `slice_api` replaces the Kubernetes API."""
    async with AsyncExitStack() as stack:
        admin_host = config.admin_host or config.host
        api_socket = stack.enter_context(listening(config.host, config.port, "--port"))
        admin_socket = stack.enter_context(listening(admin_host, config.admin_port, "--admin-port"))
        source = await stack.enter_async_context(_endpoint_source(config, slice_api))
        parts = await stack.enter_async_context(_parts(config, router_secret))
        router = RunningRouter(url_of(api_socket), url_of(admin_socket), parts.fleet, parts.admission, parts.metrics)

        def is_ready() -> bool:
            return source.synced.is_set() and not router.is_stopping

        def publish(addresses: Set[Address]) -> None:
            _publish(parts, addresses, EndpointState.READY if source.is_trusted_ready else EndpointState.UNKNOWN)

        # The stack unwinds upwards: API server first, admin server last but one, so that probes can watch the drain.
        admin_app = create_admin_app(parts.fleet, parts.metrics, is_ready)
        await stack.enter_async_context(_task(source.run(publish), "endpoint source"))
        await stack.enter_async_context(_task(_housekeeping(parts.fleet, parts.api_keys), "housekeeping"))
        await stack.enter_async_context(
            _http_server(admin_app, admin_socket, Connections(_ADMIN_CONNECTIONS), shutdown_timeout_seconds=1.0)
        )
        limits = Limits(config.max_body_size, config.request_timeout, config.retries)
        app = create_app(Handler(parts, limits), parts.models, parts.api_keys)
        connections = Connections(
            ConnectionLimits(possible_connections(config.max_connections), config.max_connections_per_peer)
        )
        parts.metrics.observe_connections(lambda: len(connections))
        await stack.enter_async_context(
            _http_server(app, api_socket, connections, shutdown_timeout_seconds=config.shutdown_timeout)
        )
        try:
            yield router
        finally:
            router.is_stopping = True


@contextlib.asynccontextmanager
async def _parts(config: RouterConfig, router_secret: str | None) -> AsyncIterator[Parts]:
    """The object graph; everything that holds connections is closed at the end."""
    index = ApproximatePrefixIndex(config.prefix_index_size, config.prefix_ttl)
    admission = Admission(config.max_queue_size, config.max_queue_wait)
    fleet = Fleet(
        index,
        time.perf_counter,
        admission.wake,
        max_in_flight=config.max_in_flight,
        block_tokens=config.prefix_block_size,
        own_models=frozenset() if config.model is None else {config.model},
    )
    metrics = Metrics(config.policy)
    bodies = BodyBudget(config.max_held_body_size)
    metrics.observe_bodies(lambda: bodies.num_bytes)
    metrics.observe_queue(lambda: admission.num_waiting)
    metrics.observe_endpoints(fleet.num_in_state)
    async with proxy.open_session(config.connect_timeout) as session:
        prober = Prober(fleet, session, config.probe_interval)
        try:
            yield Parts(
                models=ModelCatalog(config.model, config.model_alias, fleet.known_models, int(time.time())),
                api_keys=None if config.api_keys_file is None else ApiKeys.load(config.api_keys_file),
                router_secret=router_secret,
                prompt_settings=PromptSettings(config.prefix_block_size, config.bytes_per_token),
                bodies=bodies,
                admission=admission,
                picker=Picker(_POLICIES[config.policy]()),
                fleet=fleet,
                prober=prober,
                proxy=proxy.Proxy(session),
                metrics=metrics,
            )
        finally:
            await prober.close()


def _publish(parts: Parts, addresses: Set[Address], initial_state: EndpointState) -> None:
    urls, revisions = parts.fleet.urls(), parts.fleet.revisions()
    parts.fleet.set_addresses(addresses, initial_state)
    parts.prober.follow(addresses)
    for url in urls - parts.fleet.urls():
        parts.metrics.forget_endpoint(url)
    for revision in revisions - parts.fleet.revisions():
        parts.metrics.forget_revision(revision)
    logger.info("endpoints: %s", ", ".join(sorted(address.url for address in addresses)) or "none")


@contextlib.asynccontextmanager
async def _endpoint_source(config: RouterConfig, slice_api: SliceApi | None) -> AsyncIterator[Source]:
    if config.endpoints_service is None:
        yield StaticSource(config.endpoint)
        return
    service = ServiceReference.parse(config.endpoints_service)
    if slice_api is not None:
        yield KubernetesSource(slice_api, service.port)
        return
    from kvasir_router.endpoints import kubernetes_api  # slow to import, see there

    async with kubernetes_api.connect(service) as api:
        yield KubernetesSource(api, service.port)


async def _housekeeping(fleet: Fleet, api_keys: ApiKeys | None) -> None:
    while True:
        await asyncio.sleep(_HOUSEKEEPING_SECONDS)
        fleet.expire_prefixes()
        if api_keys is not None:
            api_keys.reload()


@contextlib.asynccontextmanager
async def _task(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs beside the block and ends with it; its failure ends the block."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work, name=name)
        try:
            yield
        finally:
            task.cancel()


class _Server(uvicorn.Server):
    """uvicorn without two habits: taking over the signals, and waking ten times a second to look for an end."""

    def __init__(self, config: uvicorn.Config, last_answers: LastAnswers, shutdown_timeout_seconds: float) -> None:
        super().__init__(config)
        self._last_answers = last_answers
        self._shutdown_timeout_seconds = shutdown_timeout_seconds
        self._stop = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Half of the time for what clients still ask, so that the answers which then begin have the other half."""
        for server in self.servers:
            server.close()
        begin = time.monotonic()
        if self.server_state.connections:
            await self._last_answers.give(self._shutdown_timeout_seconds / 2)
        seconds_left = self._shutdown_timeout_seconds - (time.monotonic() - begin)
        self.config.timeout_graceful_shutdown = max(math.ceil(seconds_left), 1)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _http_server(
    app: ASGIApp, listener: socket.socket, connections: Connections, *, shutdown_timeout_seconds: float
) -> AsyncIterator[None]:
    """Serves on a bound socket; at the end takes no more connections and waits for the requests of those it has."""
    last_answers = LastAnswers(app)
    config = uvicorn.Config(
        last_answers,
        loop="none",
        http=cast(Any, partial(BoundedHttpProtocol, counted_in=connections)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,  # an engine's own headers pass through unchanged
        timeout_keep_alive=_CLIENT_KEEPALIVE_SECONDS,
    )
    server = _Server(config, last_answers, shutdown_timeout_seconds)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]), name="http server")
        try:
            yield
        finally:
            server.stop()
