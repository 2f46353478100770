"""Steps over pipeline stages: every stage but the last hands on hidden states, the last one draws.

All stages take the same plans in the same order. A stage that fails hands on a message all the same, marked as failed,
and computes nothing until a plan comes that was made with the failure known; on the last stage the step's result
raises. So a failed step leaves no other stage waiting, and ends its own requests only.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.errors import CollectiveFailedError, StageFailedError
from kvasir_runtime.execution.executor import PendingResult, StepRunner
from kvasir_runtime.execution.kv_memory import KvMemory
from kvasir_runtime.execution.layer_runner import LayerRunner
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.stage_buffer import LineFormat, StageBuffer
from kvasir_runtime.execution.transfers import Download, Transfers
from kvasir_runtime.parallel.stage_link import StageLink
from kvasir_runtime.scheduling.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

Made = TypeVar("Made")
_NOTHING = np.zeros(0, dtype=np.int32)


class StageFailures:
    """What has failed on one stage, as far as plans do not know of it yet."""

    def __init__(self, number: int, *, is_alone: bool) -> None:
        """`number` counts stages from 1; `is_alone`: whether no other rank shares the stage's layers. Others would
        stand in the middle of a step that one has left: there a failure is the group's."""
        self.number = number
        self._is_alone = is_alone
        self._unknown_from: int | None = None
        """`StepPlan.num_failures` of a plan that failed here."""

    def attempt(self, plan: StepPlan, part: Callable[[], Made]) -> Made | StageFailedError:
        """Do a part of a step, unless the step may build on one that failed."""
        if plan.num_failures == self._unknown_from:
            return StageFailedError("a step before this one failed")
        try:
            return part()
        except CollectiveFailedError:  # another rank's end
            raise
        except Exception as error:
            if not self._is_alone:
                raise
            logger.exception("step %d failed on pipeline stage %d", plan.number, self.number)
            self._unknown_from = plan.num_failures
            return StageFailedError(f"on pipeline stage {self.number}: {type(error).__name__}: {error}")


class EarlierStage:
    """A `StepRunner` of any stage but the last."""

    def __init__(
        self,
        layers: LayerRunner,
        link: StageLink,
        failures: StageFailures,
        *,
        entering: StageBuffer | None,
        leaving: LineFormat,
        kv_memory: KvMemory | None = None,
    ) -> None:
        """Nothing enters the first stage."""
        self._layers = layers
        self._link = link
        self._failures = failures
        self._entering = entering
        self._leaving = leaving
        self._kv_memory = KvMemory(layers.kv_buffer) if kv_memory is None else kv_memory

    @property
    def kv_buffer(self) -> Tensor:
        return self._layers.kv_buffer

    @property
    def kv_memory(self) -> KvMemory:
        return self._kv_memory

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Compute a step and hand it on. A failure is told with the step's result."""
        failed_stage = 0 if self._entering is None else receive(self._link, self._entering, plan)
        lines = self._failures.attempt(plan, lambda: self._layers.run(plan))
        if isinstance(lines, StageFailedError):
            message = self._leaving.message(None, plan.num_tokens, self._failures.number)
        else:
            message = self._leaving.message(lines, plan.num_tokens, failed_stage)
        self._link.send(message)

    def sample(self) -> PendingResult:
        """Draws nothing: the result is empty."""
        return NothingDrawn()

    def use_idle_time(self) -> bool:
        return self._kv_memory.prepare_next()


class NothingDrawn:
    def result(self) -> StepResult:
        return StepResult(_NOTHING.reshape(0, 1), _NOTHING, _NOTHING)


class LastStage:
    """A `StepRunner` around that of the last layers."""

    def __init__(
        self,
        runner: StepRunner,
        link: StageLink,
        failures: StageFailures,
        *,
        entering: StageBuffer,
        rows: Rows,
        transfers: Transfers,
    ) -> None:
        """`runner` reads what has arrived in `entering`, and keeps what it draws and proposes in `rows`."""
        self._runner = runner
        self._link = link
        self._failures = failures
        self._entering = entering
        self._rows = rows
        self._transfers = transfers
        self._plan: StepPlan | None = None
        self._failed_stage: Tensor | None = None
        self._failure: StageFailedError | None = None

    @property
    def kv_buffer(self) -> Tensor:
        return self._runner.kv_buffer

    @property
    def kv_memory(self) -> KvMemory:
        return self._runner.kv_memory

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self._plan, self._failed_stage = plan, receive(self._link, self._entering, plan)
        self._failure = self._failures.attempt(plan, lambda: self._runner.forward(plan))

    @torch.inference_mode()
    def sample(self) -> PendingResult:
        """The failure of any stage is told by the result."""
        plan, failed_stage = self._plan, self._failed_stage
        assert plan is not None, "sample() follows a forward()"
        assert failed_stage is not None
        if self._failure is not None:
            return FailedResult(self._failure)
        drawn = self._failures.attempt(plan, lambda: self._runner.sample())
        if isinstance(drawn, StageFailedError):
            return FailedResult(drawn)
        return StagedResult(drawn, self._transfers.download([failed_stage, self._drafts(plan)]))

    def use_idle_time(self) -> bool:
        return self._runner.use_idle_time()

    def _drafts(self, plan: StepPlan) -> Tensor:
        """What the rows hold for the next step, int32 [num_sampled, num_proposals], a copy."""
        if not plan.num_proposals:
            return self._rows.drafts.new_empty((int(plan.samples.sum()), 0))
        (rows,) = self._transfers.upload(plan.rows[plan.samples].astype(np.int64))
        return self._rows.drafts[rows, : plan.num_proposals]


class FailedResult:
    def __init__(self, failure: StageFailedError) -> None:
        self._failure = failure

    def result(self) -> StepResult:
        raise self._failure


class StagedResult:
    """What was drawn, and the drafts, of which the stages before must hear, unless one of them has failed."""

    def __init__(self, drawn: PendingResult, download: Download) -> None:
        self._drawn = drawn
        self._download = download

    def result(self) -> StepResult:
        """Raises StageFailedError."""
        result = self._drawn.result()
        failed_stage, drafts = self._download.arrays()
        if failed_stage[0]:
            raise StageFailedError(f"on pipeline stage {int(failed_stage[0])}, whose log says why")
        return msgspec.structs.replace(result, drafts=drafts)


def receive(link: StageLink, entering: StageBuffer, plan: StepPlan) -> Tensor:
    """Wait for a step's states; see `StageBuffer.failed_stage`."""
    link.receive(entering.message(plan.num_tokens))
    return entering.failed_stage()
