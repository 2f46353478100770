"""`kvasir-operator run`: the object graph, and what kopf starts and stops of it.

One event loop holds everything. kopf hears the signals and calls `_start` and `_stop_parts`; between them run the
informers, the workers that reconcile, discovery with the resync, and the Lease.
"""

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Collection, Iterable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import kopf
import uvloop

from kvasir_logging import log_to_stderr
from kvasir_operator.autoscaling.ledger import ScalingLedger
from kvasir_operator.autoscaling.loop import Autoscaler, Clock
from kvasir_operator.autoscaling.prometheus import Prometheus, PrometheusAccess
from kvasir_operator.errors import KvasirOperatorError, described
from kvasir_operator.handlers import Lifecycle, kopf_registry, kopf_settings
from kvasir_operator.kube.cached import CachedClient
from kvasir_operator.kube.client import ClientHooks, KubeClient
from kvasir_operator.kube.configuration import load_configuration
from kvasir_operator.kube.features import Discovery, wait_until_served
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, Kind, KubeObject
from kvasir_operator.kube.leadership import Leadership, lease_names, make_electors
from kvasir_operator.kube.lease import LeaseTiming
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.observe.cache import InformerCache
from kvasir_operator.observe.gateway import LOOK_SECONDS, GatewayObserver
from kvasir_operator.observe.informer import Informers
from kvasir_operator.parts import STOP_GRACE_SECONDS, Parts
from kvasir_operator.probes import serving_probes
from kvasir_operator.queue.back_off import BackOff
from kvasir_operator.queue.schedule import KeySchedule
from kvasir_operator.queue.work_queue import WorkQueue
from kvasir_operator.queue.worker import resync, work
from kvasir_operator.reconcile import Reconciler, utc_now
from kvasir_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

STALL_SECONDS = 300.0
"""A service that waits for a worker, or a pass that runs, for longer than this fails the liveness probe."""
# Objects made and not freed; 700 by default, of which a pass alone makes more.
_COLLECTION_THRESHOLD = 10_000
_OWN_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def run_operator(settings: OperatorSettings) -> None:
    """Blocks until SIGTERM or SIGINT. Raises KvasirOperatorError when the operator cannot start or cannot go on."""
    log_to_stderr(settings.log_level, settings.log_format)
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it reports each of its own steps at INFO
    _collect_garbage_seldom()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Operator(settings).run())


def _collect_garbage_seldom() -> None:
    """What was imported stays, and is not walked through again while changes wait; passes leave few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTION_THRESHOLD, 20, 20)


class Operator:
    """One running operator; made and run within one event loop."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._namespaces = settings.namespace or None
        self._cache = InformerCache(is_namespaced=self._namespaces is not None)
        self._metrics = OperatorMetrics(self._services)
        self._queue = WorkQueue(
            time.monotonic, KeySchedule(BackOff(settings.retry_initial_seconds, settings.retry_max_seconds))
        )
        self._resources = AsyncExitStack()
        self._parts = Parts(self._fail)
        self._workers: list[asyncio.Task[None]] = []
        self._informers: Informers | None = None
        self._stop_flag = asyncio.Event()
        self._is_served = False
        self._failure: KvasirOperatorError | None = None

    async def run(self) -> None:
        """Returns after a signal. Raises KvasirOperatorError when a part cannot start or go on."""
        async with self._resources:
            await self._open()
            try:
                await self._run_kopf()
            except Exception as error:
                raise self._failure or KvasirOperatorError(f"kopf ended by itself: {described(error)}") from error
        if self._failure is not None:
            raise self._failure

    async def _open(self) -> None:
        """What is closed again at the end, last opened first."""
        settings, metrics = self._settings, self._metrics
        configuration = await load_configuration(settings.kubeconfig)
        # Of its own: a renewal must neither wait for a connection behind writes nor be refused as they are.
        leases = KubeClient(configuration, ClientHooks(on_request=metrics.count_request))
        self._resources.push_async_callback(leases.close)
        self._leadership = _leadership(leases, settings)
        hooks = ClientHooks(self._leadership.check, metrics.count_request, lambda: self._discovery.doubt())
        self._client = CachedClient(configuration, self._cache, hooks)
        self._resources.push_async_callback(self._client.close)
        self._prometheus = _prometheus(settings)
        if self._prometheus is not None:
            self._resources.push_async_callback(self._prometheus.close)
        self._gateway = GatewayObserver(self._client, settings.defaults.gateway, self._namespaces, self._queue.add)
        metrics.watch_queue(lambda: self._queue.depth, lambda: self._queue.longest_wait_seconds)
        probes = serving_probes(settings.host, settings.port, metrics.registry, self._alive, self._ready)
        logger.info("metrics and probes on %s", await self._resources.enter_async_context(probes))
        self._resources.push_async_callback(self._leadership.release)

    async def _run_kopf(self) -> None:
        identity: Any = _identity()  # kopf's own holds the user's name, which no /etc/passwd has for a pod's user
        await kopf.operator(
            identity=identity,
            registry=kopf_registry(
                Lifecycle(self._start, self._stop_parts), lambda: load_configuration(self._settings.kubeconfig)
            ),
            settings=kopf_settings(),
            standalone=True,
            clusterwide=self._namespaces is None,
            namespaces=self._namespaces or (),
            stop_flag=self._stop_flag,
        )

    def _services(self) -> Iterable[KubeObject]:
        """Those that informers have shown."""
        for namespace in self._namespaces or (None,):
            yield from self._cache.read_all(INFERENCE_SERVICE, namespace) or ()

    async def _start(self) -> None:
        """Returns when this process may reconcile; a signal cancels it."""
        try:
            kinds = await wait_until_served(self._client, self._namespaces)
            self._is_served = True
            await self._leadership.acquire()
        except KvasirOperatorError as error:
            self._failure = error
            raise
        self._metrics.set_leader(True)
        self._start_parts(kinds)

    def _start_parts(self, kinds: frozenset[Kind]) -> None:
        settings, client, start = self._settings, self._client, self._parts.start
        if settings.leader_election:
            start("Lease", self._leadership.keep())  # first begun, last stopped: passes that drain must be the leader's
        self._informers = Informers(
            client,
            self._namespaces,
            self._cache,
            self._queue.debounce,
            partial(self._queue.add, is_urgent=True),
            lambda: self._discovery.kinds,
        )
        self._discovery = Discovery(
            client,
            kinds,
            self._informers.follow_kinds,
            partial(resync, client, self._namespaces, self._queue, settings.resync_seconds),
        )
        start("informers", self._informers.run())
        start("discovery", self._discovery.run(settings.resync_seconds))
        if settings.defaults.gateway is not None:
            start("gateway", self._gateway.run(min(LOOK_SECONDS, settings.resync_seconds)))
        self._discovery.doubt()  # who stood by for long asked long ago
        ledger = ScalingLedger()
        if self._prometheus is not None:
            clock = Clock(time.time, utc_now, client.unix)
            scaler = Autoscaler(client, self._prometheus, ledger, settings, self._metrics, self._queue.add, clock)
            start("autoscaler", scaler.run(settings.autoscaling_seconds))
        reconciler = Reconciler(
            client,
            settings,
            lambda: self._discovery.kinds,
            self._gateway,
            client.now,
            do_changes_wait=self._queue.has_urgent,
            ledger=ledger,
            restarts=self._metrics.restarts,
        )
        self._workers = [
            start(f"worker {number}", work(self._queue, reconciler, self._metrics))
            for number in range(settings.workers)
        ]

    def _fail(self, error: KvasirOperatorError) -> None:
        """A part ended: so must all. The first one says why."""
        self._failure = self._failure or error
        self._stop_flag.set()

    async def _stop_parts(self) -> None:
        """Passes that run may end, unless another operator may be leading by now."""
        logger.info("stopping: passes that run may end within %g s", STOP_GRACE_SECONDS)
        await drain(self._leadership, self._queue, self._parts, self._workers if self._failure is None else ())
        await self._resources.aclose()  # here, because kopf waits for whatever task is left

    def _alive(self) -> str | None:
        waited = self._queue.longest_wait_seconds
        return f"a service has waited for {waited:.0f} s" if waited > STALL_SECONDS else None

    def _ready(self) -> str | None:
        if not self._is_served:
            return "the API server has not answered yet"
        if self._informers is None:
            return None  # standing by is all that is asked for
        return None if self._informers.are_synced else "the first lists are not read yet"


async def drain(
    leadership: Leadership, queue: WorkQueue, parts: Parts, draining: Collection[asyncio.Task[None]]
) -> None:
    """Has the passes of `draining` end as this leader's, which makes no Lease anew meanwhile; then stops all parts."""
    leadership.end()
    queue.close()
    await parts.stop(draining)


def _prometheus(settings: OperatorSettings) -> Prometheus | None:
    if settings.prometheus_url is None:
        return None
    names = ("token_file", "basic_auth_folder", "headers_folder", "ca_file")
    paths = {name: Path(path) for name in names if (path := getattr(settings, f"prometheus_{name}"))}
    return Prometheus(PrometheusAccess(settings.prometheus_url, **paths, is_verified=settings.prometheus_verify))


def _leadership(client: KubeClient, settings: OperatorSettings) -> Leadership:
    timing, names = LeaseTiming.of(settings.lease_seconds), lease_names(settings, _own_namespace())
    electors = make_electors(client, names, _identity(), time.monotonic, timing)
    return Leadership(electors, timing.retry_seconds)


def _identity() -> str:
    # Unique per process, as client-go's: a restarted container must not take its predecessor's Lease for its own. The
    # namespace says which release it is.
    namespace, name = _own_namespace(), os.environ.get("POD_NAME") or socket.gethostname()
    return f"{f'{namespace}/' if namespace else ''}{name}_{os.urandom(4).hex()}"


def _own_namespace() -> str | None:
    try:
        return _OWN_NAMESPACE_FILE.read_text().strip()
    except OSError:
        return None
