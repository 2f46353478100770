"""Workers: what becomes of a key after a good pass, a failed pass, and when its service is gone."""

import asyncio
import logging
import re

import pytest
from kubernetes.aio.client import Configuration
from tests.operator.cluster_objects import service
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import KubeUnavailableError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, ServiceKey
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.observe.gateway import GatewayObserver
from kvasir_operator.queue.back_off import BackOff
from kvasir_operator.queue.schedule import KeySchedule
from kvasir_operator.queue.work_queue import WorkQueue
from kvasir_operator.queue.worker import resync, work
from kvasir_operator.reconcile import Outcome, Reconciler
from kvasir_operator.settings import OperatorSettings

KEY = ServiceKey("models", "llama")


class ScriptedReconciler(Reconciler):
    """Each pass gives the script's next entry, or never ends where that is HANGS; the last one closes the queue."""

    def __init__(self, queue: WorkQueue, script: list[Outcome | Exception | None]) -> None:
        kube = KubeClient(Configuration())
        gateway = GatewayObserver(kube, None, None, lambda key: None)
        super().__init__(kube, OperatorSettings(), lambda: frozenset(), gateway)
        self.queue = queue
        self.script = script

    async def reconcile(self, key: ServiceKey) -> Outcome:
        step = self.script.pop(0)
        if not self.script:
            self.queue.close()
        if step is HANGS:
            await asyncio.Event().wait()
            raise AssertionError
        if isinstance(step, Exception):
            raise step
        if step.is_gone:
            self.queue.add(key)  # made anew at once
        return step


HANGS = None
"""A pass whose API server never answers."""


def worked(
    *script: Outcome | Exception | None, spacing_seconds: float = 0.0, pass_timeout_seconds: float = 10.0
) -> OperatorMetrics:
    """Runs one worker until the script is used up: every entry but the first must have been queued by the worker."""

    async def body() -> OperatorMetrics:
        metrics = OperatorMetrics()
        queue = WorkQueue(asyncio.get_running_loop().time, KeySchedule(BackOff(0.001, 1.0), spacing_seconds))
        queue.add(KEY)
        reconciler = ScriptedReconciler(queue, list(script))
        await asyncio.wait_for(work(queue, reconciler, metrics, pass_timeout_seconds), 10)
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


def test_before_the_first_failure_there_is_a_count_of_none() -> None:
    assert sample(worked(Outcome()), "reconcile_total", result="error") == 0.0


def test_a_pass_may_ask_for_another() -> None:
    assert sample(worked(Outcome(retry_seconds=0.001), Outcome()), "reconcile_total", result="success") == 2.0


def test_a_bug_is_logged_with_its_place_and_does_not_end_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        worked(KeyError("spec"), Outcome())
    (record,) = caplog.records
    assert "models/llama: pass failed" in record.message
    assert record.exc_info is not None


def test_a_pass_that_hangs_is_given_up_and_tried_again() -> None:
    metrics = worked(HANGS, Outcome(), pass_timeout_seconds=0.01)
    assert sample(metrics, "reconcile_errors_total", error="TimeoutError") == 1.0
    assert sample(metrics, "reconcile_total", result="success") == 1.0


def test_a_service_that_is_gone_is_forgotten_with_its_failures(caplog: pytest.LogCaptureFixture) -> None:
    down = KubeUnavailableError("down")
    with caplog.at_level(logging.WARNING):
        worked(down, down, Outcome(is_gone=True), down, Outcome())
    assert [re.findall(r"again in (\S+) s", message) for message in caplog.messages] == [
        ["0.001"],
        ["0.002"],
        ["0.001"],
    ]


def test_a_service_that_is_made_anew_does_not_wait_for_the_spacing_of_the_one_that_is_gone() -> None:
    metrics = worked(Outcome(is_gone=True), Outcome(), spacing_seconds=3600.0)
    assert sample(metrics, "reconcile_total", result="success") == 2.0


def test_a_resync_queues_every_service_over_a_tenth_of_its_interval() -> None:
    async def body() -> ServiceKey | None:
        now, kube = 0.0, MemoryKube()
        kube.objects[(INFERENCE_SERVICE.kind, "models", "llama")] = service()
        queue = WorkQueue(lambda: now, KeySchedule(spacing_seconds=0.0))
        await resync(kube, None, queue, 3600.0)
        now = 360.0
        return await asyncio.wait_for(queue.get(), 10)

    assert asyncio.run(body()) == KEY
