"""Where the engine core hands a step over to the device, and collects its results one step later.

One rank runs in the engine core's own process: a single thread owns the model and takes batches in order, so planning
the next step and talking to clients overlap with the device's work. More ranks will stand behind the same two calls.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from kvasir_runtime.scheduling.batch import BatchOutput, ScheduledBatch


class BatchRunner(Protocol):
    """What executes a batch, in order of the calls (ModelRunner)."""

    def run(self, batch: ScheduledBatch) -> BatchOutput: ...


class Executor:
    """Runs batches in order on one thread of its own, which calls `prepare_thread` before the first."""

    def __init__(self, runner: BatchRunner, prepare_thread: Callable[[], None] | None = None) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device", initializer=prepare_thread)

    def execute(self, batch: ScheduledBatch) -> Future[BatchOutput]:
        return self._thread.submit(self._runner.run, batch)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
