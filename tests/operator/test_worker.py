"""Workers: what becomes of a key after a good pass, a failed pass, and when its service is gone."""

import asyncio
import logging

import pytest
from kubernetes.aio.client import Configuration

from kvasir_operator.errors import KubeUnavailableError
from kvasir_operator.kinds import INFERENCE_SERVICE, ServiceKey
from kvasir_operator.kube import KubeClient
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.queue import BackOff, WorkQueue
from kvasir_operator.reconcile import Outcome, Reconciler
from kvasir_operator.settings import OperatorSettings
from kvasir_operator.worker import resync, work

from .cluster_objects import service
from .memory_kube import MemoryKube

KEY = ServiceKey("models", "llama")


class ScriptedReconciler(Reconciler):
    """Each pass gives the script's next entry; the last one closes the queue."""

    def __init__(self, queue: WorkQueue, script: list[Outcome | Exception]) -> None:
        super().__init__(KubeClient(Configuration()), OperatorSettings())
        self.queue = queue
        self.script = script

    async def reconcile(self, key: ServiceKey) -> Outcome:
        step = self.script.pop(0)
        if not self.script:
            self.queue.close()
        if isinstance(step, Exception):
            raise step
        return step


def worked(*script: Outcome | Exception) -> OperatorMetrics:
    """Runs one worker until the script is used up: every entry but the first must have been queued by the worker."""

    async def body() -> OperatorMetrics:
        metrics = OperatorMetrics()
        queue = WorkQueue(asyncio.get_running_loop().time, BackOff(0.001, 0.001), spacing_seconds=0.0)
        queue.add(KEY)
        await asyncio.wait_for(work(queue, ScriptedReconciler(queue, list(script)), metrics), 10)
        return metrics

    return asyncio.run(body())


def sample(metrics: OperatorMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"kvasir_operator_{name}", labels)


def test_a_failed_pass_is_tried_again_and_counted() -> None:
    metrics = worked(KubeUnavailableError("down"), Outcome())
    assert sample(metrics, "reconcile_total", result="error") == 1.0
    assert sample(metrics, "reconcile_total", result="success") == 1.0
    assert sample(metrics, "reconcile_errors_total", error="KubeUnavailableError") == 1.0
    assert sample(metrics, "reconcile_duration_seconds_count") == 2.0


def test_a_pass_may_ask_for_another() -> None:
    assert sample(worked(Outcome(retry_seconds=0.001), Outcome()), "reconcile_total", result="success") == 2.0


def test_a_bug_is_logged_with_its_place_and_does_not_end_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        worked(KeyError("spec"), Outcome())
    (record,) = caplog.records
    assert "models/llama: pass failed" in record.message
    assert record.exc_info is not None


def test_a_service_that_is_gone_is_forgotten() -> None:
    assert sample(worked(Outcome(is_gone=True)), "reconcile_total", result="success") == 1.0


def test_the_resync_queues_every_service_again_even_after_an_outage() -> None:
    async def body() -> ServiceKey | None:
        kube = MemoryKube()
        kube.objects[(INFERENCE_SERVICE.kind, "models", "llama")] = service()
        kube.failures = [KubeUnavailableError("down")]
        queue = WorkQueue(asyncio.get_running_loop().time)
        running = asyncio.create_task(resync(kube, None, queue, 0.01))
        key = await asyncio.wait_for(queue.get(), 10)
        running.cancel()
        return key

    assert asyncio.run(body()) == KEY
