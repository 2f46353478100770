"""`kvasir-operator run`: builds the parts, starts them, waits for a signal, and stops them in order.

One event loop holds everything: kopf (events of services), the watches of children, the workers that reconcile, the
resync, the Lease and the probes. A part that ends by itself ends the operator: Kubernetes starts it anew.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Collection, Coroutine, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import kopf

from kvasir_operator.cached_kube import CachedKube
from kvasir_operator.child_cache import ChildCache
from kvasir_operator.child_watch import ChildWatch
from kvasir_operator.errors import KvasirOperatorError
from kvasir_operator.handlers import kopf_registry, kopf_settings
from kvasir_operator.kinds import LISTED_CHILD_KINDS, POD
from kvasir_operator.kube import KubeClient, load_configuration
from kvasir_operator.lease import LeaderElector, LeaseTiming
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.probes import serving_probes
from kvasir_operator.queue import BackOff, WorkQueue
from kvasir_operator.reconcile import Reconciler
from kvasir_operator.settings import OperatorSettings
from kvasir_operator.startup import wait_until_served
from kvasir_operator.worker import resync, work

logger = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 20.0
STALL_SECONDS = 300.0
"""A service that waits for a worker, or a pass that runs, for longer than this fails the liveness probe."""
_OWN_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def run_operator(settings: OperatorSettings) -> None:
    """Blocks until SIGTERM or SIGINT. Raises KvasirOperatorError when the operator cannot start or cannot go on."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells each of its own steps at INFO
    asyncio.run(Operator(settings).run())


class Operator:
    """One running operator; made and run within one event loop."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._metrics = OperatorMetrics()
        self._queue = WorkQueue(time.monotonic, BackOff(settings.retry_initial_seconds, settings.retry_max_seconds))
        self._stop = asyncio.Event()
        self._is_served = False
        self._kopf_ready = asyncio.Event()
        self._children = ChildCache()
        self._watches: list[ChildWatch] = []

    async def run(self) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            client = CachedKube(
                await load_configuration(settings.kubeconfig), self._children, self._metrics.count_write
            )
            stack.push_async_callback(client.close)
            self._metrics.watch_queue(lambda: self._queue.depth)
            probes = serving_probes(settings.host, settings.port, self._metrics.registry, self._alive, self._ready)
            logger.info("metrics and probes on %s:%d", settings.host, await stack.enter_async_context(probes))
            self._stop_on_signals()
            await self._unless_stopped(wait_until_served(client, settings.namespace))
            if self._stop.is_set():
                return
            self._is_served = True
            elector = await self._lead(client, stack)
            if not self._stop.is_set():
                await self._reconcile(client, elector)

    async def _unless_stopped(self, step: Coroutine[Any, Any, None]) -> None:
        """Returns when the step has ended, or was cancelled because the operator is to stop."""
        stepping, stopping = asyncio.create_task(step), asyncio.create_task(self._stop.wait())
        await asyncio.wait({stepping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await _cancel([stepping, stopping])
        if not stepping.cancelled():
            stepping.result()

    async def _lead(self, client: KubeClient, stack: AsyncExitStack) -> LeaderElector | None:
        """Returns when this process may reconcile, or is to stop; the Lease is released when `stack` unwinds."""
        if not self._settings.leader_election:
            self._metrics.set_leader(True)
            return None
        elector = LeaderElector(client, _lease_namespace(self._settings), _identity(), time.monotonic, LeaseTiming())
        await self._unless_stopped(elector.acquire())
        stack.push_async_callback(elector.release)
        self._metrics.set_leader(not self._stop.is_set())
        return elector

    async def _reconcile(self, client: KubeClient, elector: LeaderElector | None) -> None:
        namespace, list_turn = self._settings.namespace, asyncio.Lock()
        self._watches = [
            ChildWatch(client, kind, namespace, self._children, self._queue.add, list_turn)
            for kind in (*LISTED_CHILD_KINDS, POD)
        ]
        reconciler = Reconciler(client, self._settings, do_changes_wait=self._queue.has_urgent)
        workers = [
            _part(f"worker {number}", work(self._queue, reconciler, self._metrics))
            for number in range(self._settings.workers)
        ]
        watchers = [
            *(_part("watch of children", watch.run()) for watch in self._watches),
            _part("resync", resync(client, namespace, self._queue, self._settings.resync_seconds)),
            _part("kopf", self._kopf()),
        ]
        keeper = [] if elector is None else [_part("Lease", elector.keep())]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({stopping, *workers, *watchers, *keeper}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                raise _why_ended(next(part for part in (*keeper, *watchers, *workers) if part.done()))
            await self._drain(workers)
        finally:
            await _cancel([stopping, *watchers, *workers])
            await _cancel(keeper)  # last: passes that drain must still be the leader's

    async def _drain(self, workers: Collection[asyncio.Task[None]]) -> None:
        logger.info("stopping: passes that run may end within %g s", STOP_GRACE_SECONDS)
        self._queue.close()
        await asyncio.wait(workers, timeout=STOP_GRACE_SECONDS)

    async def _kopf(self) -> None:
        namespace = self._settings.namespace
        identity: Any = _identity()  # kopf's own holds the user's name, which no /etc/passwd has for a pod's user
        tasks = await kopf.spawn_tasks(
            identity=identity,
            registry=kopf_registry(
                lambda: load_configuration(self._settings.kubeconfig), partial(self._queue.add, is_urgent=True)
            ),
            settings=kopf_settings(),
            standalone=True,
            clusterwide=namespace is None,
            namespaces=[] if namespace is None else [namespace],
            ready_flag=self._kopf_ready,
            stop_flag=self._stop,
        )
        self._stop_on_signals()  # kopf has just put its own handlers in place of ours
        await kopf.run_tasks(tasks, ignored=_EveryTask())

    def _stop_on_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    def _alive(self) -> str | None:
        waited = self._queue.longest_wait_seconds
        return f"a service has waited for {waited:.0f} s" if waited > STALL_SECONDS else None

    def _ready(self) -> str | None:
        if not self._is_served:
            return "the API server has not answered yet"
        if not self._watches:
            return None  # standing by is all that is asked for
        is_synced = self._kopf_ready.is_set() and all(watch.synced.is_set() for watch in self._watches)
        return None if is_synced else "the first lists are not read yet"


class _EveryTask(Collection[asyncio.Task[Any]]):
    """What kopf must leave alone when it stops: it would cancel every task that began after it, ours too."""

    def __contains__(self, task: object) -> bool:
        return True

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(asyncio.all_tasks())

    def __len__(self) -> int:
        return len(asyncio.all_tasks())


def _part(name: str, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(body, name=name)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=STOP_GRACE_SECONDS)


def _why_ended(part: asyncio.Task[None]) -> KvasirOperatorError:
    cause = part.exception()
    if isinstance(cause, KvasirOperatorError):
        return cause
    error = KvasirOperatorError(f"the operator's {part.get_name()} ended by itself: {cause!r}")
    error.__cause__ = cause
    return error


def _identity() -> str:
    # Unique per process, as client-go's: a restarted container must not take its predecessor's Lease for its own.
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.urandom(4).hex()}"


def _lease_namespace(settings: OperatorSettings) -> str:
    named = settings.lease_namespace or settings.namespace
    if named is not None:
        return named
    try:
        return _OWN_NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise KvasirOperatorError(
            "--leader-election needs a namespace for its Lease: give --lease-namespace (this is not a pod)"
        ) from error
