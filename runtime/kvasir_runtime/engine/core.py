"""The engine's step loop: receive, schedule, execute, update, emit.

`steps_ahead` steps may be queued on the device beyond the one whose results are awaited: the next step is planned and
handed over while others run, so the device never waits for planning. At 0 each step is finished before the next is
planned. An idle engine sleeps in its channel and uses no CPU.
"""

import logging
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvasir_runtime.engine.channel import CoreChannel
from kvasir_runtime.engine.held_grammars import POLL_SECONDS, HeldGrammars
from kvasir_runtime.engine.kv_transfers import KvTransfers
from kvasir_runtime.engine.messages import (
    Abort,
    AbortRequests,
    ApiGone,
    EndRequests,
    MoveRequests,
    RequestsEnd,
    ResetPrefixCache,
    Sleep,
    StepOutputs,
)
from kvasir_runtime.engine.router_feed import RouterFeed
from kvasir_runtime.execution.executor import PendingResult
from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.requests.outputs import Outcome, SequenceOutput
from kvasir_runtime.requests.stats import STEP_TOKENS_BOUNDS, SchedulerStats
from kvasir_runtime.scheduling.scheduler import Scheduler
from kvasir_runtime.scheduling.step import DecayingRate, StepPlan, StepResult, TimedStep

logger = logging.getLogger(__name__)

STATS_INTERVAL_SECONDS = 0.25
MAX_FAILED_STEPS_IN_A_ROW = 3
HALF_LIFE_SECONDS = 5.0
"""Of work: after so much of it an observation counts half."""
MIN_PREFILL_TOKENS = 128
"""In a step, before it says how fast prompts are computed: fewer tell what a step costs whatever is in it."""


class Clock(Protocol):
    """Seconds, as the standard library's module `time` tells them."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...

    def thread_time(self) -> float: ...


class StepExecutor(Protocol):
    """Whatever executes steps, in the order of the calls: a thread of this process, or ranks of their own."""

    def forward(self, plan: StepPlan) -> None:
        """Begin a step. Its failure is told by `sample`."""

    def sample(self) -> Future[PendingResult]:
        """End the step begun last."""

    def prepare_grammar(self, grammar: str) -> Future[None]:
        """Make what follows it, beside the steps. The future ends when that is there, or cannot be made: then the
        request's first step tells why."""

    def recover(self) -> None:
        """Run what is queued from now on, after every future of a failed queue has been taken. Raises where that
        cannot be."""

    def use_idle_time(self) -> None:
        """Nothing will come for a while."""

    def release_kv(self) -> None:
        """Give the KV cache's memory back; nothing is in it that is wanted."""

    def restore_kv(self) -> None:
        """Take it again, before the next step."""


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step on the device, or queued for it."""

    plan: StepPlan
    pending: Future[PendingResult]


@dataclass(frozen=True, slots=True)
class Moment:
    """When a step ended, or the core woke up: seconds of a monotonic clock, and of the core's own thread."""

    clock: float
    processor: float


class StepRates:
    """How fast the engine works, over the last seconds in which it did: what an idle hour does not dilute; and how many
    tokens its steps have.

    Both rates count what steps took on the clock, planning and other sequences' decodes included.
    """

    def __init__(self) -> None:
        self.steps = DecayingRate(HALF_LIFE_SECONDS)
        """Steps a second."""
        self.prefill = DecayingRate(HALF_LIFE_SECONDS)
        """Prompt tokens a second; known once a step has computed many."""
        self.tokens_counts = [0] * (len(STEP_TOKENS_BOUNDS) + 1)
        self.tokens_sum = 0

    def observe_step(self, step: TimedStep) -> None:
        num_tokens = step.num_decodes + step.num_asked + step.num_prompt_tokens
        self.tokens_counts[bisect_left(STEP_TOKENS_BOUNDS, num_tokens)] += 1
        self.tokens_sum += num_tokens
        self.steps.observe(1, step.clock_seconds)
        if step.num_prompt_tokens >= MIN_PREFILL_TOKENS:
            self.prefill.observe(step.num_prompt_tokens, step.clock_seconds)


class EngineCore:
    def __init__(
        self,
        executor: StepExecutor,
        channel: CoreChannel,
        scheduler: Scheduler,
        *,
        steps_ahead: int,
        observers: Sequence[Callable[[TimedStep], None]] = (),
        router_feed: RouterFeed | None = None,
        transfers: KvTransfers | None = None,
        clock: Clock = time,
    ) -> None:
        """`observers` want to know how long steps take."""
        self._executor = executor
        self._channel = channel
        self._scheduler = scheduler
        self._steps_ahead = steps_ahead
        self._router_feed = router_feed
        self._transfers = transfers
        self._clock = clock
        self._grammars = HeldGrammars(executor.prepare_grammar)
        self._is_blocked = False  # nothing can be planned before other engines are done with some pages
        self._gone: set[int] = set()
        """API processes that have died; what they sent before may still come in."""
        self._rates = StepRates()
        self._observers = (self._rates.observe_step, *observers)
        self._running_steps: deque[RunningStep] = deque()
        self._num_steps = 0
        self._num_failed_in_a_row = 0
        self._last_step_time = clock.time()
        self._last_end = self._now()
        self._last_stats: SchedulerStats | None = None
        self._last_stats_time = 0.0
        self._wanted_sleep: Sleep | None = None

    def run(self) -> int:
        """Step until steps fail again and again, or until the engine is to sleep: at the level that is returned. What
        was under way is dropped then, and nothing is cached."""
        while self._wanted_sleep is None:
            self.step()
        level, self._wanted_sleep = self._wanted_sleep.level, None
        self._add_all(self._grammars.take_all())  # those that keep KV for them hear of their end too
        for request_id in self._scheduler.all_requests():
            self._abort(Abort(request_id))
        while self._running_steps:
            self._finish(self._running_steps.popleft(), Outcome())
        self._scheduler.reset_prefix_cache()
        self._emit(Outcome())
        return level

    def step(self) -> None:
        """One turn of the loop: plan a step, and take the results of the oldest once enough are under way."""
        self._receive()
        settled = [] if self._transfers is None else self._transfers.receive()
        plan = self._scheduler.schedule(self._last_end.clock)
        if plan is not None:
            self._running_steps.append(self._execute(plan))
        has_steps = bool(self._running_steps)  # a result may be all that a plan waits for
        outcome = Outcome(outputs=settled + self._scheduler.take_rejected())
        if self._running_steps and (plan is None or len(self._running_steps) > self._steps_ahead):
            self._finish(self._running_steps.popleft(), outcome)
        if self._transfers is not None:
            self._transfers.publish(outcome)
            self._is_blocked = not has_steps and self._transfers.holds_pages
            self._is_blocked &= not outcome.outputs  # those that were given up may have made room
        self._emit(outcome)

    @property
    def _is_idle(self) -> bool:
        return not self._running_steps and (self._is_blocked or not self._scheduler.has_work)

    def _receive(self) -> None:
        is_idle = self._is_idle
        if is_idle:
            self._executor.use_idle_time()
            idle_seconds = None if self._router_feed is None else self._router_feed.wait_seconds()
            messages = self._channel.receive(0.0 if self._grammars.wait(POLL_SECONDS) else idle_seconds)
            self._last_end = self._now()
        else:
            messages = self._channel.receive(0.0)
        for message in messages:
            match message:
                case AddRequest():
                    if self._router_feed is not None:
                        self._router_feed.arrive(message)
                    if message.api_index not in self._gone and not self._grammars.hold(message):
                        self._add(message)
                case AbortRequests():
                    for abort in message.aborts:
                        self._abort(abort)
                case MoveRequests() if self._transfers is not None:
                    self._channel.broadcast(self._transfers.moving(message.http_request_id))
                case EndRequests():
                    self._channel.broadcast(RequestsEnd(names=message.names))
                case ResetPrefixCache():
                    self._scheduler.reset_prefix_cache()
                case Sleep():
                    self._wanted_sleep = message
                case ApiGone():
                    self._gone.add(message.api_index)
                    self._channel.forget(message.api_index)
                    self._add_all(self._grammars.take_all(message.api_index))
                    for request_id in self._scheduler.requests_of(message.api_index):
                        self._abort(Abort(request_id))
        if self._grammars:
            self._add_all(self._grammars.take_ready())

    def _add_all(self, messages: Sequence[AddRequest]) -> None:
        for message in messages:
            self._add(message)

    def _add(self, message: AddRequest) -> None:
        if self._transfers is not None and message.spec.kv_transfer_params is not None:
            self._transfers.add(message, self._rates.prefill.value)
        else:
            self._scheduler.add(message)

    def _abort(self, abort: Abort) -> None:
        self._add_all(self._grammars.take(abort.request_id))
        if self._transfers is not None and abort.is_kept:
            self._transfers.keep(abort.request_id)
        self._scheduler.abort(abort.request_id, abort.index)
        if self._transfers is not None:
            self._transfers.abort(abort.request_id)

    def _execute(self, plan: StepPlan) -> RunningStep:
        self._executor.forward(plan)
        return RunningStep(plan, self._executor.sample())

    def _finish(self, step: RunningStep, outcome: Outcome) -> None:
        """Wait for a step's results and let the scheduler take them."""
        try:
            result = step.pending.result().result()  # waits for it; raises what it raised
        except Exception as error:
            self._fail(step, error, outcome)
        else:
            self._num_failed_in_a_row = 0
            self._observe(step.plan, result)
            self._scheduler.update(step.plan, result, outcome)
        self._num_steps += 1
        self._last_step_time = self._clock.time()

    def _observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step's time is all that passes from one result to the next, or on a CPU what the threads work in between:
        what drafts cost the core counts as well."""
        now, before = self._now(), self._last_end
        self._last_end = now
        seconds = clock_seconds = now.clock - before.clock
        if result.times.processor_seconds is not None:
            seconds = now.processor - before.processor + result.times.processor_seconds
        num_decode_tokens = int(plan.num_new_tokens[: plan.num_decodes].sum())
        num_asked = num_decode_tokens - plan.num_decodes
        step = TimedStep(
            num_decodes=plan.num_decodes,
            num_prompt_tokens=int(plan.num_new_tokens[plan.num_decodes :].sum()),
            num_asked=num_asked,
            num_accepted=int(np.maximum(result.num_accepted - 1, 0).sum()) if num_asked else 0,
            num_proposals=plan.num_proposals,
            seconds=seconds,
            clock_seconds=clock_seconds,
            is_warming_up=result.times.is_warming_up,
        )
        for observe in self._observers:
            observe(step)

    def _now(self) -> Moment:
        return Moment(self._clock.monotonic(), self._clock.thread_time())

    def _fail(self, step: RunningStep, error: Exception, outcome: Outcome) -> None:
        """A step that raised ends its own requests only; the device is given up when it goes on like this."""
        self._num_failed_in_a_row += 1
        self._last_end = self._now()
        logger.exception("step %d failed with %d sequences", self._num_steps, len(step.plan.rows), exc_info=error)
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
            raise error
        while self._running_steps:
            self._running_steps.popleft().pending.exception()  # skipped, or of no use: planned again below
        self._executor.recover()
        self._scheduler.fail(step.plan, f"the step that computed this request failed: {error}", outcome)

    def _emit(self, outcome: Outcome) -> None:
        """Send out what a turn brought: to the clients first, then to routers."""
        stats = self._stats()
        by_api: dict[int, list[SequenceOutput]] = defaultdict(list)
        for addressed in outcome.outputs:
            by_api[addressed.api_index].append(addressed.output)
        for api_index in by_api.keys() | outcome.plain.keys():
            self._channel.send(
                api_index,
                StepOutputs(outputs=by_api.get(api_index, []), plain=outcome.plain.get(api_index), stats=stats),
            )
        if self._router_feed is not None:
            self._router_feed.publish(stats)
        self._broadcast_stats()

    def _broadcast_stats(self) -> None:
        """Tell everybody how things stand, now and then and before falling asleep."""
        is_due = self._last_step_time - self._last_stats_time >= STATS_INTERVAL_SECONDS
        if not is_due and not self._is_idle:
            return
        stats = self._stats()  # with what was published just now
        if is_due or stats != self._last_stats:
            self._last_stats_time = self._last_step_time
            self._last_stats = stats
            self._channel.broadcast(StepOutputs(outputs=[], stats=stats))

    def _stats(self) -> SchedulerStats:
        return self._scheduler.stats(
            self._num_steps,
            self._last_step_time,
            steps_per_second=self._rates.steps.value or 0.0,
            step_tokens_counts=self._rates.tokens_counts,
            step_tokens_sum=self._rates.tokens_sum,
            prefill_tokens_per_second=self._rates.prefill.value,
            num_kv_events=0 if self._router_feed is None else self._router_feed.num_kv_events,
            transfers=None if self._transfers is None else self._transfers.stats(),
        )
