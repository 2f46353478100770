"""The engine's step loop: receive, schedule, execute, update, emit.

One step ahead: step N+1 is planned and handed to the device while step N runs, and N's results are taken when N+1 is on
its way, so the device never waits for planning. Switched off, each step is finished before the next is planned. An idle
engine sleeps in its channel and uses no CPU.
"""

import logging
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kvasir_runtime.engine.messages import (
    AbortRequests,
    AddRequest,
    FromCore,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToCore,
)
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.scheduling.batch import BatchOutput, ScheduledBatch
from kvasir_runtime.scheduling.request import request_from
from kvasir_runtime.scheduling.scheduler import AddressedOutput, Scheduler

logger = logging.getLogger(__name__)

STATS_INTERVAL_SECONDS = 0.25
MAX_FAILED_STEPS_IN_A_ROW = 3


class Channel(Protocol):
    """The core's end of the connection to the API processes."""

    def receive(self, timeout_seconds: float | None) -> list[ToCore]:
        """Messages waiting; with none, wait so long for the first (None: for ever, 0: not at all)."""

    def send(self, api_index: int, message: FromCore) -> None: ...

    def broadcast(self, message: FromCore) -> None: ...


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step on the device."""

    batch: ScheduledBatch
    result: Future[BatchOutput]


class EngineCore:
    def __init__(
        self,
        executor: Executor,
        channel: Channel,
        scheduler: Scheduler,
        *,
        block_size: int,
        max_model_len: int,
        one_step_ahead: bool,
    ) -> None:
        self._executor = executor
        self._channel = channel
        self._scheduler = scheduler
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._one_step_ahead = one_step_ahead
        self._running_step: RunningStep | None = None
        self._num_steps = 0
        self._num_failed_in_a_row = 0
        self._last_step_time = time.time()
        self._last_stats_time = 0.0
        self._is_shut_down = False

    def run(self) -> None:
        """Step until told to shut down, or until steps fail again and again."""
        while not self._is_shut_down:
            self.step()

    def step(self) -> None:
        """One turn of the loop: plan a step, and take the results of the one before (of this one, if not ahead)."""
        self._receive()
        batch = self._scheduler.schedule()
        next_step = RunningStep(batch, self._executor.execute(batch)) if batch else None
        finished, self._running_step = self._running_step, next_step
        if finished is not None:
            self._finish(finished)
        if self._running_step is not None and not self._one_step_ahead:
            self._finish(self._running_step)
            self._running_step = None

    def _receive(self) -> None:
        is_idle = self._running_step is None and not self._scheduler.has_requests
        for message in self._channel.receive(None if is_idle else 0.0):
            match message:
                case AddRequest():
                    self._scheduler.add(
                        request_from(message, max_model_len=self._max_model_len, block_size=self._block_size)
                    )
                case AbortRequests():
                    for request_id in message.request_ids:
                        self._scheduler.abort(request_id)
                case Shutdown():
                    self._is_shut_down = True

    def _finish(self, step: RunningStep) -> None:
        """Wait for a step's results and send them out."""
        try:
            output = step.result.result()
        except Exception as error:
            outputs = self._fail(step, error)
        else:
            self._num_failed_in_a_row = 0
            outputs = self._scheduler.update(step.batch, output)
        self._num_steps += 1
        self._last_step_time = time.time()
        self._emit(outputs)

    def _fail(self, step: RunningStep, error: Exception) -> list[AddressedOutput]:
        """A step that raised ends its own requests only; the device is given up when it goes on like this."""
        self._num_failed_in_a_row += 1
        logger.exception("step %d failed with %d requests", self._num_steps, len(step.batch.requests), exc_info=error)
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
            raise error
        return self._scheduler.fail(step.batch, f"the step that computed this request failed: {error}")

    def _emit(self, outputs: list[AddressedOutput]) -> None:
        stats = self._scheduler.stats(self._num_steps, self._last_step_time)
        by_api: dict[int, list[RequestOutput]] = defaultdict(list)
        for addressed in outputs:
            by_api[addressed.api_index].append(addressed.output)
        is_stats_due = self._last_step_time - self._last_stats_time >= STATS_INTERVAL_SECONDS
        if is_stats_due or not self._scheduler.has_requests:
            self._last_stats_time = self._last_step_time
            self._channel.broadcast(StepOutputs(outputs=[], stats=stats))
        for api_index, outputs_of_api in by_api.items():
            self._channel.send(api_index, StepOutputs(outputs=outputs_of_api, stats=stats))
