"""Where the engine core hands steps over to the device, and collects their results some steps later.

One rank runs in the engine core's own process: a single thread owns the model and takes steps in order, so planning the
next step and talking to clients overlap with the device's work. A step has two halves: `forward` hands the decoder's
kernels to the device, and `sample` works out on the host, while they run, what may be drawn. More ranks stand behind
the same calls.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from kvasir_runtime.errors import StepSkippedError
from kvasir_runtime.scheduling.step import StepPlan, StepResult

if TYPE_CHECKING:
    from torch import Tensor  # not for a core whose ranks are elsewhere

    from kvasir_runtime.execution.kv_memory import KvMemory

logger = logging.getLogger(__name__)


PrepareGrammar = Callable[[str], Future[None]]
"""Begins to make what follows a grammar, on other threads than steps; the future never fails."""


class PendingResult(Protocol):
    """A step that the device may still be busy with."""

    def result(self) -> StepResult:
        """Wait for it."""


class StepRunner(Protocol):
    """What executes steps, in the order of the calls (ModelRunner)."""

    @property
    def kv_buffer(self) -> "Tensor":
        """That the steps write, uint8 [num_blocks, page_bytes]."""

    @property
    def kv_memory(self) -> "KvMemory":
        """Under it."""

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self) -> PendingResult:
        """Draw the tokens of the oldest step that went forward and was not sampled."""

    def use_idle_time(self) -> bool:
        """Do one piece of work that steps can do without (capture a graph); whether there is more."""


class Executor:
    """A queue of steps, taken in order by one thread of its own, which calls `prepare_thread` before the first.

    When a step raises, those queued behind it are skipped, since they may build on it, until `recover`.
    """

    def __init__(
        self,
        runner: StepRunner,
        prepare_thread: Callable[[], None] | None = None,
        prepare_grammar: PrepareGrammar | None = None,
    ) -> None:
        self._runner = runner
        self._prepare_grammar = prepare_grammar
        self._prepare_thread = prepare_thread
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._is_told = False  # of the failure, through a future
        self._is_idle = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def forward(self, plan: StepPlan) -> None:
        """Begin a step. Its failure is told by `sample`."""
        self._queue.put(partial(self._forward, plan))

    def sample(self) -> Future[PendingResult]:
        """End the step begun last. Raises, through the future, what the step raised; StepSkippedError behind such a
        step."""
        future: Future[PendingResult] = Future()
        self._queue.put(partial(self._sample, future))
        return future

    def prepare_grammar(self, grammar: str) -> Future[None]:
        """Beside the steps; the future ends when it is done, whatever comes of it."""
        if self._prepare_grammar is not None:
            return self._prepare_grammar(grammar)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def recover(self) -> None:
        """Run what is queued from now on, after every future of the failed queue has been taken."""
        self._failure, self._is_told = None, False

    def use_idle_time(self) -> None:
        """Nothing will come for a while: let the runner do, piece by piece, what steps can do without."""
        self._queue.put(self._begin_idle_time)

    def release_kv(self) -> None:
        """Behind all steps: give the KV cache's memory back."""
        self._queue.put(self._release_kv)

    def restore_kv(self) -> None:
        """Take it again, before any step. A failure is the next step's."""
        self._queue.put(self._restore_kv)

    def close(self) -> None:
        """End the thread after the step that it is in."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._prepare_thread is not None:
            self._prepare_thread()
        while (work := self._next_work()) is not None:
            work()

    def _next_work(self) -> Callable[[], None] | None:
        """What is queued; in idle time the runner may work while nothing is, then the thread sleeps."""
        while self._is_idle and self._queue.empty():
            try:
                self._is_idle = self._runner.use_idle_time()
            except Exception:
                logger.exception("work in idle time failed; it is not tried again before the next")
                self._is_idle = False
        return self._queue.get()

    def _begin_idle_time(self) -> None:
        self._is_idle = True

    def _release_kv(self) -> None:
        self._is_idle = False
        self._runner.kv_memory.release()

    def _restore_kv(self) -> None:
        try:
            self._runner.kv_memory.restore()
        except Exception as error:
            self._failure = error

    def _forward(self, plan: StepPlan) -> None:
        self._is_idle = False
        if self._failure is None:
            try:
                self._runner.forward(plan)
            except Exception as error:
                self._failure = error

    def _sample(self, future: Future[PendingResult]) -> None:
        if self._failure is None:
            try:
                future.set_result(self._runner.sample())
                return
            except Exception as error:
                self._failure = error
        is_told, self._is_told = self._is_told, True  # who hears of it may recover at once
        future.set_exception(StepSkippedError("a step before this one failed") if is_told else self._failure)
