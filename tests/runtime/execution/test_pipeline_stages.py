"""A step through two stages: what is handed on, and that one that fails leaves the other neither waiting nor behind."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.runtime.parallel.queue_link import queue_links
from torch import Tensor

from kvasir_runtime.errors import CollectiveFailedError, StageFailedError
from kvasir_runtime.execution.pipeline_stages import EarlierStage, LastStage, StageFailures
from kvasir_runtime.execution.stage_buffer import LineFormat, StageBuffer
from kvasir_runtime.scheduling.step import StepPlan, StepResult

FORMAT = LineFormat(2, 4, torch.float32, torch.device("cpu"))


class FakeLayers:
    """Lines of the step's number; raises what it is told to."""

    kv_buffer = torch.zeros(0, 8, dtype=torch.uint8)

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.num_steps = 0

    def run(self, plan: StepPlan) -> Tensor:
        self.num_steps += 1
        if self.error is not None:
            raise self.error
        return torch.full((plan.num_tokens, 2, 4), float(plan.number))


class FakeRunner:
    """Draws the number that has arrived."""

    def __init__(self, entering: StageBuffer) -> None:
        self.error: Exception | None = None
        self._entering = entering

    def forward(self, plan: StepPlan) -> None:
        if self.error is not None:
            raise self.error
        self._number = int(self._entering.states[0, 0, 0])

    def sample(self) -> "FakeRunner":
        return self

    def result(self) -> StepResult:
        ones = np.ones(1, dtype=np.int32)
        return StepResult(ones[:, None] * self._number, ones, ones * 0)

    def use_idle_time(self) -> bool:
        return False


class Pipeline:
    def __init__(self, rows: Any, transfers: Any, is_alone: bool = True) -> None:
        first, last = queue_links(2)
        entering = StageBuffer(FORMAT, 8)
        self.layers, self.runner = FakeLayers(), FakeRunner(entering)
        self.first = EarlierStage(
            self.layers,  # type: ignore[arg-type]
            first,
            StageFailures(1, is_alone=is_alone),
            entering=None,
            leaving=FORMAT,
        )
        self.last = LastStage(
            self.runner,
            last,
            StageFailures(2, is_alone=is_alone),
            entering=entering,
            rows=rows,
            transfers=transfers,
        )

    def step(self, plan: StepPlan) -> StepResult:
        self.first.forward(plan)
        assert not len(self.first.sample().result().token_ids)
        self.last.forward(plan)
        return self.last.sample().result()


@pytest.fixture
def pipeline(make_rows: Any, transfers: Any) -> Pipeline:
    rows = make_rows()
    rows.drafts[3] = torch.tensor([8, 9])
    return Pipeline(rows, transfers)


@pytest.fixture
def numbered(make_plan: Any) -> Any:
    def plan(number: int, num_failures: int = 0) -> StepPlan:
        plan = make_plan(decodes=[(3, 2)], proposals=2)
        return msgspec.structs.replace(plan, number=number, num_failures=num_failures)

    return plan


def test_a_result_brings_the_drafts_that_the_rows_hold(pipeline: Pipeline, numbered: Any) -> None:
    result = pipeline.step(numbered(5))
    assert result.token_ids.tolist() == [[5]]
    assert result.drafts is not None
    assert result.drafts.tolist() == [[8, 9]]


def test_a_step_without_drafts_uploads_nothing_for_them(pipeline: Pipeline, make_plan: Any, transfers: Any) -> None:
    result = pipeline.step(make_plan(decodes=[(3, 1), (1, 1)]))
    assert result.drafts is not None
    assert result.drafts.shape == (2, 0)
    assert transfers.uploads == []


def test_a_failure_of_an_earlier_stage_is_told_with_the_result(pipeline: Pipeline, numbered: Any) -> None:
    pipeline.layers.error = RuntimeError("fell over")
    with pytest.raises(StageFailedError, match="on pipeline stage 1, whose log says why"):
        pipeline.step(numbered(5))
    pipeline.layers.error = None
    with pytest.raises(StageFailedError, match="stage 1"):
        pipeline.step(numbered(6))
    assert pipeline.layers.num_steps == 1, "it may build on the one that failed"
    assert pipeline.step(numbered(7, num_failures=1)).token_ids.tolist() == [[7]]


def test_the_last_stages_own_failure_says_what_it_was(pipeline: Pipeline, numbered: Any) -> None:
    pipeline.runner.error = RuntimeError("fell over")
    with pytest.raises(StageFailedError, match="on pipeline stage 2: RuntimeError: fell over"):
        pipeline.step(numbered(5))
    pipeline.runner.error = None
    with pytest.raises(StageFailedError, match="a step before this one failed"):
        pipeline.step(numbered(6))
    assert pipeline.step(numbered(7, num_failures=1)).token_ids.tolist() == [[7]]


@pytest.mark.parametrize(
    ("is_alone", "error"), [(False, RuntimeError("fell over")), (True, CollectiveFailedError("a rank has ended"))]
)
def test_what_other_ranks_stand_in_the_middle_of_is_the_groups_failure(
    is_alone: bool, error: Exception, make_rows: Any, transfers: Any, numbered: Any
) -> None:
    pipeline = Pipeline(make_rows(), transfers, is_alone)
    pipeline.layers.error = error
    with pytest.raises(type(error), match=str(error)):
        pipeline.first.forward(numbered(5))
