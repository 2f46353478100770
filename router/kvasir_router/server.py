"""Kvasir's router: builds its parts from the configuration, runs them, and takes them down in order.

Start: sockets, parts, endpoint source, servers. Stop: not ready, requests to their end, no new connections, the rest.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import uvloop

from kvasir_http.connections import ConnectionLimits, Connections, most_descriptors
from kvasir_logging import log_to_stderr
from kvasir_router.admin import create_admin_app
from kvasir_router.admission.tenant_limits import TenantLimits
from kvasir_router.api_keys import ApiKeys
from kvasir_router.app import Handler, Parts
from kvasir_router.config import RouterConfig, gateway_secret_of, router_secret_of
from kvasir_router.debug.decisions import DecisionLog
from kvasir_router.discovery import Kubernetes, discovering
from kvasir_router.kept_responses import KeptResponses
from kvasir_router.memory import memory_limit_bytes, most_unread_bytes, within_limit
from kvasir_router.metrics import Metrics
from kvasir_router.relay.body import BodyBudget
from kvasir_router.relay.http_protocol import Forwarding
from kvasir_router.relay.http_server import http_server, listening, url_of
from kvasir_router.relay.kv_transfer import HANDOVERS
from kvasir_router.relay.proxy import Proxy
from kvasir_router.relay.upstream_pool import UPSTREAM_TIMES, UpstreamPool
from kvasir_router.remote_prefill import RemotePrefills
from kvasir_router.routes import DIALECTS, create_app
from kvasir_router.service.factory import ServiceFactory
from kvasir_router.service.series import DemandCollector, WakeCollector
from kvasir_router.service.service import Services
from kvasir_router.tuning import TUNING, Tuning

if TYPE_CHECKING:
    from kvasir_router.service.peer_feed import PeerFeed

logger = logging.getLogger(__name__)

# Probes, scrapes, and somebody who looks.
_ADMIN_CONNECTIONS = ConnectionLimits(total=256, per_peer=64)


# Objects made and not freed; 700 by default, of which a request alone makes a hundred.
_COLLECTION_THRESHOLD = 20_000


def collect_garbage_seldom() -> None:
    """What is there now stays, and is not looked at again; requests leave next to no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTION_THRESHOLD, 20, 20)


def return_free_memory() -> None:
    """Of large bodies that were held: glibc keeps theirs. 5 ms for 40 MB, 0.3 ms where there is next to none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


@dataclass
class RunningRouter:
    """Base URLs and the parts that tell what is going on."""

    url: str
    admin_url: str
    services: Services
    metrics: Metrics
    is_synced: Callable[[], bool]
    is_stopping: bool = False

    @property
    def is_ready(self) -> bool:
        return self.is_synced() and not self.is_stopping


def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT; a second one ends at once. Raises StartupError."""
    secret = gateway_secret_of(os.environ) if config.gateway else router_secret_of(os.environ)
    log_to_stderr(config.log_level, config.log_format)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(asyncio.CancelledError):
        runner.run(_serve_until_signal(config, secret, Tuning(memory_limit_bytes=memory_limit_bytes())))


async def _serve_until_signal(config: RouterConfig, secret: str | None, tuning: Tuning) -> None:
    stop = asyncio.Event()
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None

    def signalled() -> None:
        if stop.is_set():
            serving.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with running(config, secret=secret, tuning=tuning) as router:
        logger.info(
            "serving on %s, probes and metrics on %s; %s/debug/routing shows why a request went where it went",
            router.url,
            router.admin_url,
            router.admin_url,
        )
        collect_garbage_seldom()
        await stop.wait()
        logger.info("stopping: running requests get up to %g s", config.shutdown_timeout)


@contextlib.asynccontextmanager
async def running(
    config: RouterConfig,
    kubernetes: Kubernetes | None = None,
    secret: str | None = None,
    tuning: Tuning = TUNING,
) -> AsyncIterator[RunningRouter]:
    """A router that serves while the block runs and drains at its end. `kubernetes` replaces the real API; engines know
    the router by `secret`, or of a gateway by one that is derived of it for each service.
    """
    config = within_limit(config, tuning.memory_limit_bytes)
    async with AsyncExitStack() as stack:
        admin_host = config.admin_host or config.host
        api_socket = stack.enter_context(listening(config.host, config.port, "--port"))
        admin_socket = stack.enter_context(listening(admin_host, config.admin_port, "--admin-port"))
        metrics = Metrics()
        session = await stack.enter_async_context(_probe_session(config.connect_timeout))
        pool = await stack.enter_async_context(UpstreamPool(config.connect_timeout, config.request_timeout))
        tenant_limits = TenantLimits(
            config.tenant_tokens_per_minute, config.tenant_max_in_flight, on_room=lambda: found.services.wake()
        )
        decisions = DecisionLog()
        peer_feed = (
            None if config.peers is None else await stack.enter_async_context(_peer_feed(config, secret, tuning))
        )
        if peer_feed is not None:
            metrics.observe_peers(lambda: peer_feed.num_peers)
        factory = ServiceFactory(
            config, session, tenant_limits, decisions, peer_feed, tuning, take_heard=pool.take_heard
        )
        stack.callback(factory.close)
        found = await stack.enter_async_context(discovering(config, factory, metrics, kubernetes, secret))
        parts = _parts(config, found.services, tenant_limits, pool, metrics, tuning)
        router = RunningRouter(url_of(api_socket), url_of(admin_socket), found.services, metrics, found.is_synced)

        # The stack unwinds upwards: API server first, admin server last but one, so that probes can watch the drain.
        admin_app = create_admin_app(found.services, metrics, decisions, lambda: router.is_ready)
        await stack.enter_async_context(_task(found.run(), "discovery"))
        await stack.enter_async_context(_task(_refresh(found.services, tuning.refresh_seconds), "refresh"))
        housekeeping = _housekeeping(found.services, parts.api_keys, tuning.housekeeping_seconds)
        await stack.enter_async_context(_task(housekeeping, "housekeeping"))
        await stack.enter_async_context(
            http_server(
                admin_app,
                admin_socket,
                Connections(_ADMIN_CONNECTIONS),
                shutdown_timeout_seconds=1.0,
                times=tuning.clients,
            )
        )
        kept_responses = KeptResponses(found.services, parts.api_keys, session)
        app = create_app(found.services, parts.api_keys, kept_responses, lambda: router.is_stopping, config.cors_origin)
        wanted = ConnectionLimits(config.max_connections, config.max_connections_per_peer)
        connections = Connections(
            wanted.within(most_descriptors(), per_connection=2),  # one of an engine each
            most_unread_bytes(tuning.memory_limit_bytes),
        )
        metrics.observe_connections(lambda: len(connections))
        await stack.enter_async_context(
            http_server(
                app,
                api_socket,
                connections,
                _forwarding(config, parts, tuning),
                shutdown_delay_seconds=config.shutdown_delay,
                shutdown_timeout_seconds=config.shutdown_timeout,
                times=tuning.clients,
            )
        )
        try:
            yield router
        finally:
            router.is_stopping = True


def _parts(
    config: RouterConfig,
    services: Services,
    tenant_limits: TenantLimits,
    pool: UpstreamPool,
    metrics: Metrics,
    tuning: Tuning,
) -> Parts:
    api_keys = None if config.api_keys_file is None else ApiKeys.load(config.api_keys_file)
    metrics.observe_queue(lambda: services.num_waiting)
    metrics.add(DemandCollector(services.held_demand))
    metrics.add(WakeCollector(services))
    metrics.observe_endpoints(services.num_in_state)
    metrics.observe_ejected(lambda: services.num_ejected)
    if config.kv_events is not None:
        _observe_kv_events(metrics, services)
    prefills = RemotePrefills(
        pool,
        metrics,
        HANDOVERS[config.kv_transfer_protocol],
        config.kv_transfer_port,
        tuning.late_prefill_seconds,
        tuning.clock,
    )
    return Parts(services, api_keys, tenant_limits, Proxy(pool, tuning.journal), prefills, metrics)


def _forwarding(config: RouterConfig, parts: Parts, tuning: Tuning) -> Forwarding:
    bodies = BodyBudget(config.max_held_body_size)
    parts.metrics.observe_bodies(lambda: bodies.num_bytes)
    return Forwarding(
        DIALECTS,
        Handler(parts, config.retries, config.sse_keepalive_interval, tuning.loop_bytes).handle,
        bodies,
        config.max_body_size,
        frozenset(origin.encode() for origin in config.cors_origin),
    )


def _probe_session(connect_timeout_seconds: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=UPSTREAM_TIMES.keepalive, ttl_dns_cache=10),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def _refresh(services: Services, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        for service in services:
            service.refresh()


def _observe_kv_events(metrics: Metrics, services: Services) -> None:
    from kvasir_router.service.series import KvEventCollector  # with ZMQ: 90 ms and 3 MB

    metrics.add(KvEventCollector(lambda: [each.following.feed for each in services if each.following is not None]))


@contextlib.asynccontextmanager
async def _peer_feed(config: RouterConfig, secret: str | None, tuning: Tuning) -> AsyncIterator["PeerFeed"]:
    from kvasir_router.service.peer_feed import PeerFeed  # with ZMQ: 90 ms and 3 MB

    assert config.peers is not None
    feed = PeerFeed(config.host, config.peers, secret, tuning.peers)
    try:
        async with _task(feed.run(), "peers"):
            yield feed
    finally:
        feed.close()


async def _housekeeping(services: Services, api_keys: ApiKeys | None, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        for service in services:
            service.expire()
        if api_keys is not None:
            api_keys.reload()
        return_free_memory()


@contextlib.asynccontextmanager
async def _task(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs beside the block and ends with it; its failure ends the block."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work, name=name)
        try:
            yield
        finally:
            task.cancel()
