"""What feeds on the queue, and what fills it beside events: workers and the periodic resync."""

import asyncio
import logging
import random
import time

from kvasir_operator.errors import KubeApiError, KvasirOperatorError
from kvasir_operator.kinds import INFERENCE_SERVICE, ServiceKey
from kvasir_operator.kube import KubeClient
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.queue import WorkQueue
from kvasir_operator.reconcile import Reconciler

logger = logging.getLogger(__name__)

PASS_TIMEOUT_SECONDS = 120.0
_RESYNC_SPREAD = 0.1
"""Share of the interval over which a resync's passes are spread by chance."""


async def work(queue: WorkQueue, reconciler: Reconciler, metrics: OperatorMetrics) -> None:
    """Runs passes until the queue is closed. A failed pass is logged here, once, and tried again after its back-off."""
    while (key := await queue.get()) is not None:
        started = time.monotonic()
        failure: Exception | None = None
        try:
            await _pass(queue, reconciler, key)
        except Exception as error:
            failure = error
            _log_failure(key, error, queue.failed(key))
        metrics.count_pass(time.monotonic() - started, failure)


async def _pass(queue: WorkQueue, reconciler: Reconciler, key: ServiceKey) -> None:
    async with asyncio.timeout(PASS_TIMEOUT_SECONDS):
        outcome = await reconciler.reconcile(key)
    if outcome.is_gone:
        queue.forget(key)
        return
    queue.done(key)
    if outcome.retry_seconds is not None:
        queue.add(key, outcome.retry_seconds)


def _log_failure(key: ServiceKey, error: Exception, delay_seconds: float) -> None:
    # Our own errors say all there is to say; anything else is a bug, whose place one wants to know.
    trace = None if isinstance(error, KvasirOperatorError | TimeoutError) else error
    logger.warning("%s: pass failed, again in %g s: %r", key, delay_seconds, error, exc_info=trace)


async def resync(client: KubeClient, namespace: str | None, queue: WorkQueue, interval_seconds: float) -> None:
    """Queues every service once an interval, for events that were lost. Runs until cancelled."""
    while True:
        await asyncio.sleep(interval_seconds)
        try:
            await _queue_all(client, namespace, queue, interval_seconds * _RESYNC_SPREAD)
        except KubeApiError as error:
            logger.warning("resync: %s; again in %g s", error, interval_seconds)


async def _queue_all(client: KubeClient, namespace: str | None, queue: WorkQueue, spread_seconds: float) -> None:
    async for page in client.list_pages(INFERENCE_SERVICE, namespace):
        for item in page.get("items") or []:
            metadata = item["metadata"]
            queue.add(ServiceKey(metadata["namespace"], metadata["name"]), random.uniform(0.0, spread_seconds))
