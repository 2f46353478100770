"""Steps on several ranks, behind the calls of the executor of one: plans go to all, results come from the reporter."""

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvasir_runtime.errors import StageFailedError
from kvasir_runtime.execution.executor import PendingResult
from kvasir_runtime.ranks.links import CoreLinks
from kvasir_runtime.ranks.messages import Forward, PrepareGrammar, ReleaseKv, RestoreKv, Sample, WorkInIdleTime
from kvasir_runtime.scheduling.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ArrivedResult:
    """Of a step that is done."""

    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result


@dataclass(slots=True)
class _Preparation:
    """Of a grammar."""

    num_left: int
    """Ranks that are still at it."""
    future: Future[None] = field(default_factory=Future)


class RankExecutor:
    """A step that fails where ranks share layers ends the group (`RankWatch`); on a pipeline stage of one rank it fails
    alone, since the stages stay together."""

    def __init__(self, links: CoreLinks) -> None:
        self._links = links
        self._waiting: deque[Future[PendingResult]] = deque()
        self._idle = threading.Lock()
        self._is_idle = False
        self._has_idle_work = True
        self._grammars: dict[int, _Preparation] = {}
        self._num_grammars = 0
        self.num_steps = 0
        """Handed to the ranks so far."""

    @property
    def awaits_results(self) -> bool:
        return bool(self._waiting)

    def forward(self, plan: StepPlan) -> None:
        """Begin a step."""
        with self._idle:
            self._is_idle = False
        self.num_steps += 1
        self._links.send(Forward(plan))

    def sample(self) -> Future[PendingResult]:
        """End the step begun last."""
        future: Future[PendingResult] = Future()
        self._waiting.append(future)
        self._links.send(Sample())
        return future

    def prepare_grammar(self, grammar: str) -> Future[None]:
        """On every rank, beside the steps; the future ends when the last is done, whatever comes of it."""
        number, preparation = self._num_grammars, _Preparation(self._links.num_ranks)
        self._num_grammars += 1
        self._grammars[number] = preparation
        self._links.send(PrepareGrammar(number, grammar))
        return preparation.future

    def finish_grammar(self, number: int) -> None:
        """One more rank has it."""
        preparation = self._grammars[number]
        preparation.num_left -= 1
        if not preparation.num_left:
            del self._grammars[number]
            preparation.future.set_result(None)

    def recover(self) -> None:
        """Stages find out by the plans themselves (execution/pipeline_stages.py)."""

    def use_idle_time(self) -> None:
        """Nothing will come for a while. Ranks work piece by piece, all the same one: a graph holds collectives."""
        with self._idle:
            if self._is_idle or not self._has_idle_work:
                return
            self._is_idle = True
            self._links.send(WorkInIdleTime())

    def release_kv(self) -> None:
        with self._idle:
            self._is_idle = False
        self._links.send(ReleaseKv())

    def restore_kv(self) -> None:
        """Ranks prepare that memory anew."""
        with self._idle:
            self._has_idle_work = True
        self._links.send(RestoreKv())

    def finish_step(self, result: StepResult) -> None:
        """The oldest step's has come."""
        self._waiting.popleft().set_result(ArrivedResult(result))

    def fail_step(self, error: str) -> None:
        """The oldest step has failed, and the group goes on."""
        self._waiting.popleft().set_exception(StageFailedError(error))

    def finish_idle_work(self, has_more: bool) -> None:
        with self._idle:
            self._has_idle_work = has_more
            if self._is_idle and has_more:
                self._links.send(WorkInIdleTime())
