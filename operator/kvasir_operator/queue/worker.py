"""What feeds on the queue, and what fills it beside events: workers and the periodic resync."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence

from kvasir_operator.errors import KvasirOperatorError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, ServiceKey, service_key
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.queue.work_queue import WorkQueue
from kvasir_operator.reconcile import Reconciler

logger = logging.getLogger(__name__)

PASS_TIMEOUT_SECONDS = 120.0
_SPREAD = 0.1
"""Share of the interval over which a resync's passes are spread by chance."""


async def work(
    queue: WorkQueue,
    reconciler: Reconciler,
    metrics: OperatorMetrics,
    pass_timeout_seconds: float = PASS_TIMEOUT_SECONDS,
) -> None:
    """Runs passes until the queue is closed. A failed pass is logged here, once, and tried again after its back-off."""
    while (key := await queue.get()) is not None:
        started = time.monotonic()
        failure: Exception | None = None
        try:
            await _pass(queue, reconciler, key, pass_timeout_seconds)
        except Exception as error:
            failure = error
            _log_failure(key, error, queue.failed(key))
        metrics.count_pass(time.monotonic() - started, failure)


async def _pass(queue: WorkQueue, reconciler: Reconciler, key: ServiceKey, timeout_seconds: float) -> None:
    async with asyncio.timeout(timeout_seconds):
        outcome = await reconciler.reconcile(key)
    if outcome.is_gone:
        queue.forget(key)
        return
    queue.done(key)
    if outcome.retry_seconds is not None:
        (queue.debounce if outcome.is_debounced else queue.add)(key, outcome.retry_seconds)


def _log_failure(key: ServiceKey, error: Exception, delay_seconds: float) -> None:
    # Our own errors say all there is to say; anything else is a bug, whose place one wants to know.
    trace = None if isinstance(error, KvasirOperatorError | TimeoutError) else error
    logger.warning("%s: pass failed, again in %g s: %r", key, delay_seconds, error, exc_info=trace)


async def resync(
    client: KubeClient, namespaces: Sequence[str] | None, queue: WorkQueue, interval_seconds: float
) -> None:
    """Queues every service, for events that were lost, over a part of the interval. `namespaces` None is all."""
    for namespace in namespaces or (None,):
        for service in await client.list(INFERENCE_SERVICE, namespace):
            queue.add(service_key(service), random.uniform(0.0, interval_seconds * _SPREAD))
