"""Sends a rank's results when the device has them, so that the thread that runs steps never waits for it."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvasir_runtime.errors import StageFailedError
from kvasir_runtime.execution.executor import PendingResult
from kvasir_runtime.ranks.links import RankLinks
from kvasir_runtime.ranks.messages import StepDone, StepFailed


class ResultSender:
    def __init__(self, links: RankLinks, on_failure: Callable[[Exception], object]) -> None:
        self._links = links
        self._on_failure = on_failure
        self._pending: SimpleQueue[PendingResult] = SimpleQueue()
        threading.Thread(target=self._run, name="results", daemon=True).start()

    def send(self, pending: PendingResult) -> None:
        """After those before it."""
        self._pending.put(pending)

    def _run(self) -> None:
        try:
            while True:
                self._links.send(_outcome(self._pending.get()))
        except Exception as error:
            self._on_failure(error)


def _outcome(pending: PendingResult) -> StepDone | StepFailed:
    try:
        return StepDone(pending.result())
    except StageFailedError as error:
        return StepFailed(str(error))
