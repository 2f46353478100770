"""The step loop over a channel and a device that are in memory."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.runtime.scheduling.step_columns import columns

from kvasir_runtime.engine.core import EngineCore
from kvasir_runtime.engine.held_grammars import HeldGrammars
from kvasir_runtime.engine.kv_transfers import KvTransfers
from kvasir_runtime.engine.load_report import LoadReport, LoadReporter
from kvasir_runtime.engine.messages import Abort, AbortRequests, ApiGone, Sleep, StepOutputs
from kvasir_runtime.engine.router_feed import RouterFeed
from kvasir_runtime.errors import StepSkippedError
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventLog
from kvasir_runtime.kv_cache.spec import KvGroup
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec, SequenceStart
from kvasir_runtime.requests.outputs import SequenceOutput
from kvasir_runtime.requests.sampling_params import BeamSearch, SamplingParams
from kvasir_runtime.scheduling.scheduler import Scheduler, make_scheduler
from kvasir_runtime.scheduling.step import (
    Candidates,
    SchedulerLimits,
    StepBudget,
    StepPlan,
    StepResult,
    StepTimes,
    TimedStep,
)
from kvasir_runtime.speculative.depth import FixedDepth
from kvasir_runtime.transfer.commands import CancelPull, FromAgent, OfferEnded, Place, PullEnded, ToAgent
from kvasir_runtime.transfer.metrics import TransferStats
from kvasir_runtime.transfer.params import KvTransferParams

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)


class MemoryChannel:
    """Hands out what was queued; waiting for ever on nothing is the test's mistake."""

    def __init__(self) -> None:
        self.inbox: deque = deque()
        self.sent: list[tuple[int, StepOutputs]] = []
        self.broadcasts: list[StepOutputs] = []
        self.timeouts: list[float | None] = []
        self.forgotten: list[int] = []

    def receive(self, timeout_seconds: float | None) -> list:
        self.timeouts.append(timeout_seconds)
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, api_index: int, message: StepOutputs) -> None:
        self.sent.append((api_index, message))

    def broadcast(self, message: StepOutputs) -> None:
        self.broadcasts.append(message)

    def forget(self, api_index: int) -> None:
        self.forgotten.append(api_index)


class DoneResult:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class CountingRunner:
    """The n-th step samples token n for everyone; steps named in `fails` raise."""

    def __init__(
        self, fails: tuple[int, ...] = (), processor_seconds: float | None = None, warming_up: tuple[int, ...] = ()
    ) -> None:
        self.num_steps = 0
        self.warming_up = warming_up
        self.processor_seconds = processor_seconds
        self.fails = fails
        self.threads: set[str] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def forward(self, plan: StepPlan) -> None:
        self.may_go_on.wait()
        self.num_steps += 1
        self.threads.add(threading.current_thread().name)
        if self.num_steps in self.fails:
            raise RuntimeError("device fell over")
        self._num_sampled = int(plan.samples.sum())

    def sample(self) -> DoneResult:
        ones = np.ones(self._num_sampled, dtype=np.int32)
        tokens = ones[:, None] * self.num_steps
        is_warming_up = self.num_steps in self.warming_up
        times = StepTimes(processor_seconds=self.processor_seconds, is_warming_up=is_warming_up)
        return DoneResult(StepResult(tokens, ones, ones * 0, times=times))

    def use_idle_time(self) -> bool:
        return False


class HoldingRunner(CountingRunner):
    """Every draft that a plan asks to verify holds."""

    def forward(self, plan: StepPlan) -> None:
        super().forward(plan)
        brought = plan.num_new_tokens.copy()
        brought[plan.num_decodes :] = 1
        self._num_brought = brought[plan.samples]

    def sample(self) -> DoneResult:
        brought = self._num_brought
        tokens = np.full((len(brought), int(brought.max(initial=1))), self.num_steps, dtype=np.int32)
        return DoneResult(StepResult(tokens, brought, brought - 1))


class BeamRunner(CountingRunner):
    """Reports the same candidates after everyone."""

    def forward(self, plan: StepPlan) -> None:
        super().forward(plan)
        self._rows = plan.rows[plan.samples].tolist()

    def sample(self) -> DoneResult:
        none = np.zeros(len(self._rows), dtype=np.int32)
        candidates = {row: Candidates([7, 8, 9], [-0.5, -1.0, -2.0]) for row in self._rows}
        return DoneResult(StepResult(none[:, None], none, none, columns(candidates=candidates)))


class MemoryPublisher:
    """What routers would get."""

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel
        self.events: list[KvEvent] = []
        self.reports: list[LoadReport] = []
        self.num_sent_before: list[int] = []
        """Of each batch of events: messages that clients had got by then."""

    def publish_events(self, events: list[KvEvent]) -> None:
        self.events += events
        self.num_sent_before.append(len(self._channel.sent))

    def publish_load(self, report: LoadReport) -> None:
        self.reports.append(report)


class Clock:
    """Stands still for the epoch's seconds, and goes on by one whenever the monotonic ones are read."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._num_reads = 0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        self._num_reads += 1
        return float(self._num_reads)

    def thread_time(self) -> float:
        return 0.25 * self._num_reads


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def channel() -> MemoryChannel:
    return MemoryChannel()


GROUPS = (KvGroup((0,)),)
PLACE = Place(engine_id="e", host="h", port=1)


class MemoryAgent:
    """A transfer agent that does nothing of itself."""

    def __init__(self) -> None:
        self.posted: list[ToAgent] = []
        self.events: list[FromAgent] = []

    def post(self, *commands: ToAgent) -> None:
        self.posted += commands

    def take(self) -> list[FromAgent]:
        events, self.events = self.events, []
        return events

    @property
    def bytes_per_second(self) -> None:
        return None

    def stats(self, num_leased_blocks: int) -> TransferStats:
        return TransferStats(num_leased_blocks=num_leased_blocks)


def new_scheduler(event_log: KvEventLog | None = None, depth: FixedDepth | None = None) -> Scheduler:
    return make_scheduler(
        LIMITS, policy="fcfs", num_blocks=16, block_size=4, groups=GROUPS, enable_prefix_caching=True,
        depth=depth, event_log=event_log,
    )  # fmt: skip


@pytest.fixture
def make_core(channel: MemoryChannel, clock: Clock) -> Iterator[Callable[..., EngineCore]]:
    executors: list[Executor] = []

    def make(
        runner: CountingRunner, *, ahead: int = 1, feed: RouterFeed | None = None,
        agent: "MemoryAgent | None" = None, depth: FixedDepth | None = None, executor: type[Executor] = Executor,
        observers: Sequence[Callable[[TimedStep], None]] = (),
    ) -> EngineCore:  # fmt: skip
        executors.append(executor(runner))
        scheduler = new_scheduler(None if feed is None else feed.event_log, depth)
        transfers = None if agent is None else KvTransfers(scheduler, agent, PLACE, page_bytes=1, fails_requests=False)
        return EngineCore(
            executors[-1], channel, scheduler, steps_ahead=ahead, observers=observers, router_feed=feed,
            transfers=transfers, clock=clock,
        )  # fmt: skip

    yield make
    for executor in executors:
        executor.close()


def add(request_id: str, *, api_index: int = 0, max_tokens: int = 3, http_request_id: str | None = None,
        **spec: Any) -> AddRequest:  # fmt: skip
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return AddRequest(
        request_id=request_id, api_index=api_index, arrival_time=0.0, http_request_id=http_request_id,
        spec=RequestSpec(**({"prompt_token_ids": [1, 2, 3], "sampling": sampling} | spec)),
        sequences=[SequenceStart(index=0, seed=0)],
    )  # fmt: skip


def outputs_of(channel: MemoryChannel, request_id: str) -> list[SequenceOutput]:
    return [
        output for _, message in channel.sent for output in message.outputs if output.request_id == request_id
    ]  # fmt: skip


def tokens_of(channel: MemoryChannel, request_id: str) -> list[int]:
    tokens: list[int] = []
    for _, message in channel.sent:
        tokens += [t for output in message.outputs if output.request_id == request_id for t in output.new_token_ids]
        plain = message.plain
        if plain is not None:
            ends = np.cumsum(plain.num_tokens).tolist()
            for name, end, number in zip(plain.request_ids, ends, plain.num_tokens, strict=True):
                tokens += plain.token_ids[end - number : end] if name == request_id else []
    return tokens


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_request_is_stepped_to_its_end_and_then_the_core_waits(make_core, channel, ahead):
    runner = CountingRunner()
    core = make_core(runner, ahead=ahead)
    channel.inbox.append(add("a"))
    for _ in range(8):
        core.step()
    assert tokens_of(channel, "a") == [1, 2, 3]
    assert channel.timeouts[-1] is None, "an idle core waits without a limit"
    assert 0.0 in channel.timeouts, "a busy core does not wait for messages"
    assert runner.num_steps == 3


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_so_many_steps_are_handed_over_before_results_are_taken(make_core, channel, ahead):
    core = make_core(CountingRunner(), ahead=ahead)
    channel.inbox.append(add("a", max_tokens=9))
    for _ in range(ahead):
        core.step()
    assert channel.sent == []
    core.step()
    assert tokens_of(channel, "a") == [1]


def test_outputs_go_to_the_api_process_of_their_request(make_core, channel):
    core = make_core(CountingRunner(), ahead=0)
    channel.inbox.extend([add("a", api_index=0), add("b", api_index=1)])
    core.step()
    assert {(index, message.outputs[0].request_id) for index, message in channel.sent} == {(0, "a"), (1, "b")}
    channel.sent.clear()
    core.step()
    assert {(index, tuple(message.plain.request_ids)) for index, message in channel.sent} == {(0, ("a",)), (1, ("b",))}


def test_when_the_last_request_ends_every_api_process_hears_of_the_idle_state(make_core, channel):
    core = make_core(CountingRunner(), ahead=0)
    channel.inbox.append(add("a", max_tokens=1))
    core.step()
    assert channel.broadcasts[-1].stats.num_running == 0
    assert channel.broadcasts[-1].stats.num_steps == 1


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_abort_of_the_last_request_ends_it_without_a_word_and_everybody_hears_of_the_idle_state(
    make_core, channel, ahead
):
    core = make_core(CountingRunner(), ahead=ahead)
    channel.inbox.append(add("a", max_tokens=50))
    for _ in range(ahead + 2):
        core.step()
    num_tokens = len(tokens_of(channel, "a"))
    channel.inbox.append(AbortRequests(aborts=[Abort("a")]))
    for _ in range(ahead + 2):
        core.step()
    assert len(tokens_of(channel, "a")) == num_tokens
    assert channel.timeouts[-1] is None
    last = channel.broadcasts[-1].stats
    assert (last.num_running, last.num_waiting, last.num_blocks_used) == (0, 0, 0)


def test_requests_of_an_api_process_that_has_died_end_and_its_late_ones_do_not_begin(make_core, channel):
    core = make_core(CountingRunner(), ahead=0)
    channel.inbox.extend([add("a", api_index=0), add("b", api_index=1, max_tokens=50)])
    core.step()
    channel.inbox.extend([ApiGone(1), add("late", api_index=1)])
    for _ in range(4):
        core.step()
    assert (tokens_of(channel, "a"), tokens_of(channel, "b"), tokens_of(channel, "late")) == ([1, 2, 3], [1], [])
    assert channel.forgotten == [1]
    assert channel.broadcasts[-1].stats.num_blocks_used == 0


def test_the_device_is_offered_time_whenever_the_core_has_nothing_to_do(make_core, channel):
    offers: list[int] = []

    class OfferedExecutor(Executor):
        def use_idle_time(self) -> None:
            offers.append(len(channel.timeouts))

    core = make_core(CountingRunner(), ahead=1, executor=OfferedExecutor)
    core.step()
    channel.inbox.append(add("a", max_tokens=3))
    for _ in range(6):
        core.step()
    idle = [turn for turn, timeout in enumerate(channel.timeouts) if timeout is None]
    assert len(idle) < len(channel.timeouts)
    assert idle[:2] == [0, 1], "the second time the request comes while the core waits"
    assert idle[2:], "again after the last request"
    assert offers == idle, "each time before it waits"


@pytest.fixture
def preparing() -> dict[str, list[Future[None]]]:
    """How often each grammar was to be prepared, which ends when the test says so."""
    return {}


@pytest.fixture
def grammar_executor(preparing: dict[str, list[Future[None]]]) -> type[Executor]:
    class GrammarExecutor(Executor):
        def prepare_grammar(self, grammar: str) -> Future[None]:
            future: Future[None] = Future()
            preparing.setdefault(grammar, []).append(future)
            return future

    return GrammarExecutor


def test_requests_are_held_until_their_grammars_are_prepared(make_core, channel, preparing, grammar_executor):
    core = make_core(CountingRunner(), ahead=0, executor=grammar_executor)
    channel.inbox.extend([add("a", grammar="slow"), add("b"), add("c", grammar="slow"), add("d", grammar="quick")])
    core.step()
    assert tokens_of(channel, "b") == [1], "others do not wait"
    preparing["quick"][0].set_result(None)
    core.step()
    assert (tokens_of(channel, "d"), tokens_of(channel, "a")) == ([2], [])
    for _ in range(4):
        core.step()
    assert len(tokens_of(channel, "b")) == len(tokens_of(channel, "d")) == 3
    assert channel.timeouts[-1] == 0.0, "an idle engine waits for the grammar, not for messages"
    preparing["slow"][0].set_result(None)
    channel.inbox.append(add("e", grammar="slow", max_tokens=1))
    core.step()
    assert [len(tokens_of(channel, name)) for name in "ace"] == [1, 1, 1]
    assert {grammar: len(futures) for grammar, futures in preparing.items()} == {"slow": 1, "quick": 1}


def test_a_wait_for_grammars_ends_with_the_first_or_its_time(preparing) -> None:
    def prepare(grammar: str) -> Future[None]:
        [future] = preparing[grammar] = [Future()]
        return future

    held = HeldGrammars(prepare)
    assert not held.wait(60.0), "nothing is waited for"
    held.hold(add("a", grammar="slow"))
    held.hold(add("b", grammar="quick"))
    begin = time.monotonic()
    assert held.wait(0.01)
    assert time.monotonic() - begin >= 0.01
    ending = threading.Timer(0.0, preparing["quick"][0].set_result, [None])
    ending.start()
    assert held.wait(1e6)
    assert [message.request_id for message in held.take_ready()] == ["b"]
    ending.join()


def test_a_held_request_that_nobody_wants_any_more_is_forgotten(make_core, channel, preparing, grammar_executor):
    core = make_core(CountingRunner(), ahead=0, executor=grammar_executor)
    grammar = {"grammar": "slow"}
    channel.inbox.extend([add("a", **grammar), add("b", api_index=1, **grammar), add("c", **grammar)])
    core.step()
    channel.inbox.extend([AbortRequests(aborts=[Abort("a")]), ApiGone(1), add("late", api_index=1, **grammar)])
    core.step()
    preparing["slow"][0].set_result(None)
    core.step()
    assert [len(tokens_of(channel, name)) for name in ("a", "b", "c", "late")] == [0, 0, 1, 0]


def test_a_core_that_goes_to_sleep_forgets_whom_it_holds(make_core, channel, preparing, grammar_executor):
    core = make_core(CountingRunner(), ahead=0, executor=grammar_executor)
    channel.inbox.extend([add("a", grammar="slow"), Sleep(level=1)])
    assert core.run() == 1
    preparing["slow"][0].set_result(None)
    core.step()
    assert tokens_of(channel, "a") == []


def test_an_idle_core_says_so_once(make_core, channel):
    core = make_core(CountingRunner(), ahead=0)
    channel.inbox.append(add("a", max_tokens=1))
    for _ in range(5):
        core.step()
    assert len(channel.broadcasts) <= 2


def test_a_failing_step_ends_its_requests_with_an_error_and_later_ones_are_served(make_core, channel):
    core = make_core(CountingRunner(fails=(1,)), ahead=0)
    channel.inbox.append(add("bad"))
    core.step()
    channel.inbox.append(add("good", max_tokens=2))
    for _ in range(2):
        core.step()
    (failed,) = outputs_of(channel, "bad")
    assert failed.finish_reason == "error"
    assert "device fell over" in failed.error
    assert tokens_of(channel, "good") == [2, 3]


def test_what_was_queued_behind_a_failing_step_is_planned_again(make_core, channel):
    runner = CountingRunner(fails=(2,))
    core = make_core(runner, ahead=3)
    runner.may_go_on.clear()
    channel.inbox.append(add("a", max_tokens=1))
    core.step()
    channel.inbox.append(add("bad", max_tokens=2))
    core.step()
    channel.inbox.append(add("later", max_tokens=2))
    core.step()
    runner.may_go_on.set()
    for _ in range(8):
        core.step()
    assert tokens_of(channel, "a") == [1]
    assert outputs_of(channel, "bad")[-1].finish_reason == "error"
    assert outputs_of(channel, "later")[-1].finish_reason == "length"
    assert len(tokens_of(channel, "later")) == 2


def test_failures_that_are_not_in_a_row_do_not_add_up(make_core, channel):
    core = make_core(CountingRunner(fails=(1, 2, 4, 5)), ahead=0)
    for number in range(6):
        channel.inbox.append(add(str(number), max_tokens=1))
        core.step()
    assert tokens_of(channel, "2") == [3]
    assert tokens_of(channel, "5") == [6]


def test_a_device_that_fails_again_and_again_is_given_up(make_core, channel):
    core = make_core(CountingRunner(fails=(1, 2, 3)), ahead=0)
    channel.inbox.append(add("a"))
    core.step()
    channel.inbox.append(add("b"))
    core.step()
    channel.inbox.append(add("c"))
    with pytest.raises(RuntimeError, match="device fell over"):
        core.step()


def test_the_device_is_driven_by_one_thread_of_its_own(make_core, channel):
    runner = CountingRunner()
    core = make_core(runner)
    channel.inbox.append(add("a"))
    for _ in range(5):
        core.step()
    assert len(runner.threads) == 1
    assert threading.current_thread().name not in runner.threads


@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_are_timed_from_the_end_of_the_step_before(make_core, channel, clock, ahead):
    costs: list[TimedStep] = []
    core = make_core(CountingRunner(), ahead=ahead, observers=[costs.append])
    channel.inbox.extend([add("a", max_tokens=4), add("b", max_tokens=4)])
    for _ in range(3 + ahead):
        core.step()
    prompts, *decodes = costs
    assert (prompts.num_decodes, prompts.num_prompt_tokens) == (0, 6)
    assert [(step.num_decodes, step.num_prompt_tokens, step.seconds) for step in decodes] == [(2, 0, 1.0)] * 2


def test_chunks_follow_the_time_that_steps_took_by_the_clock(make_core, channel, clock):
    budget = StepBudget(LIMITS.max_num_batched_tokens, max_step_seconds=8.0, block_size=1)
    core = make_core(CountingRunner(processor_seconds=4.0), ahead=0, observers=[budget.observe_step])
    channel.inbox.append(add("a", max_tokens=4))
    for _ in range(3):
        core.step()
    assert budget.num_prompt_tokens(1, 1, 1000) == 21  # 3 tokens in a second, and a second for the decode


def test_a_timed_step_tells_how_many_drafts_were_asked_for_and_how_many_held(make_core, channel, clock):
    costs: list[TimedStep] = []
    core = make_core(HoldingRunner(), ahead=0, observers=[costs.append], depth=FixedDepth(2))
    channel.inbox.extend([add("a", max_tokens=20), add("b", max_tokens=20)])
    for _ in range(3):
        core.step()
    assert [(step.num_asked, step.num_accepted, step.num_proposals) for step in costs] == [
        (0, 0, 2), (4, 4, 2), (4, 4, 2)
    ]  # fmt: skip


def test_on_a_cpu_the_work_of_the_threads_counts_and_not_the_clock(make_core, channel, clock):
    costs: list[TimedStep] = []
    core = make_core(CountingRunner(processor_seconds=4.0), ahead=0, observers=[costs.append])
    channel.inbox.append(add("a", max_tokens=4))
    for _ in range(3):
        core.step()
    assert [step.seconds for step in costs[1:]] == [4.25] * 2


def test_steps_that_warm_up_are_told_apart(make_core, channel, clock):
    costs: list[TimedStep] = []
    core = make_core(CountingRunner(warming_up=(2,)), ahead=0, observers=[costs.append])
    channel.inbox.append(add("a", max_tokens=4))
    for _ in range(3):
        core.step()
    assert [step.is_warming_up for step in costs] == [False, True, False]


def test_the_time_that_an_idle_core_sleeps_is_no_steps(make_core, channel, clock):
    costs: list[TimedStep] = []
    core = make_core(CountingRunner(), ahead=0, observers=[costs.append])
    for _ in range(5):
        clock.monotonic()
    channel.inbox.append(add("a", max_tokens=1))
    core.step()
    assert [step.seconds for step in costs] == [1.0]


def test_a_failed_step_is_not_timed(make_core, channel, clock):
    costs: list[TimedStep] = []
    core = make_core(CountingRunner(fails=(2,)), ahead=0, observers=[costs.append])
    channel.inbox.append(add("a", max_tokens=4))
    for _ in range(2):
        core.step()
    assert [step.num_decodes for step in costs] == [0], "the prompt's step alone"


def test_a_busy_core_tells_everybody_how_things_stand_each_quarter_of_a_second(make_core, channel, clock):
    core = make_core(CountingRunner(), ahead=0)
    channel.inbox.append(add("a", max_tokens=20))
    num_broadcasts = []
    for elapsed in (0.0, 0.0, 0.125, 0.125, 0.125, 0.125):
        clock.now += elapsed
        core.step()
        num_broadcasts.append(len(channel.broadcasts))
    assert num_broadcasts == [1, 1, 1, 2, 2, 3]
    assert channel.broadcasts[-1].stats.last_step_time == clock.now
    assert [message.stats.num_steps for message in channel.broadcasts] == [1, 4, 6]


def test_outputs_carry_the_state_after_their_step(make_core, channel):
    core = make_core(CountingRunner(), ahead=0)
    channel.inbox.append(add("a"))
    for _ in range(3):
        core.step()
    stats = [message.stats for _, message in channel.sent]
    assert [state.num_steps for state in stats] == [1, 2, 3]
    assert [state.num_running for state in stats] == [1, 1, 0]


def test_one_sequence_of_a_request_is_aborted_by_its_index(make_core, channel):
    core = make_core(CountingRunner(), ahead=0)
    both = msgspec.structs.replace(
        add("a", max_tokens=6), sequences=[SequenceStart(index=index, seed=0) for index in range(2)]
    )
    channel.inbox.append(both)
    for _ in range(3):
        core.step()
    channel.inbox.append(AbortRequests(aborts=[Abort("a", 0)]))
    for _ in range(8):
        core.step()
    assert [(output.index, output.finish_reason) for output in outputs_of(channel, "a") if output.finish_reason] == [
        (1, "length")
    ]


def test_a_failed_step_counts_as_a_step(make_core, channel):
    core = make_core(CountingRunner(fails=(1,)), ahead=0)
    channel.inbox.append(add("a"))
    core.step()
    assert channel.broadcasts[-1].stats.num_steps == 1


def test_an_impossible_request_is_answered_though_no_step_runs(make_core, channel):
    core = make_core(CountingRunner(), ahead=1)
    channel.inbox.append(add("a", beam=BeamSearch(width=5)))
    core.step()
    assert [(output.finish_reason, "width 5" in output.error) for output in outputs_of(channel, "a")] == [
        ("error", True)
    ]


@pytest.mark.parametrize("penalty", [-10.0, 10.0])
def test_a_beam_search_of_a_penalty_as_great_as_can_be_asked_for_ends(make_core, channel, penalty):
    core = make_core(BeamRunner(), ahead=0)
    beam = BeamSearch(width=2, length_penalty=penalty)
    channel.inbox.append(add("a", max_tokens=20, beam=beam))
    for _ in range(20):
        core.step()
    assert [output.new_token_ids for output in outputs_of(channel, "a")] == [[7] * 20]


class FailingExecutor:
    """The first step fails, those behind it are skipped; writes down when their futures are taken."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def forward(self, plan: StepPlan) -> None:
        self.log.append("forward")

    def sample(self) -> Future:
        future = TakenFuture(self.log)
        is_first = self.log == ["forward"]
        future.set_exception(RuntimeError("device fell over") if is_first else StepSkippedError("skipped"))
        return future

    def recover(self) -> None:
        self.log.append("recover")

    def use_idle_time(self) -> None: ...

    def prepare_grammar(self, grammar: str) -> Future[None]:
        raise NotImplementedError


class TakenFuture(Future):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._log.append("taken")
        return super().exception(timeout)


def test_the_device_recovers_only_after_all_steps_behind_the_failed_one_were_skipped(channel):
    executor = FailingExecutor()
    core = EngineCore(executor, channel, new_scheduler(), steps_ahead=2)
    channel.inbox.append(add("a", max_tokens=9))
    for _ in range(3):
        core.step()
    assert executor.log == ["forward"] * 3 + ["taken"] * 2 + ["recover"]


# --- what routers are told --------------------------------------------------------------------------------------------


@pytest.fixture
def publisher(channel: MemoryChannel) -> MemoryPublisher:
    return MemoryPublisher(channel)


def feed_of(publisher: MemoryPublisher, clock: Callable[[], float], load_hz: float | None = None) -> RouterFeed:
    reporter = None if load_hz is None else LoadReporter(load_hz, "cafe")
    return RouterFeed(KvEventLog(4, GROUPS), publisher, reporter, clock)  # type: ignore[arg-type]


def test_blocks_are_published_when_they_are_written_and_after_clients_got_their_tokens(make_core, channel, publisher):
    core = make_core(CountingRunner(), ahead=0, feed=feed_of(publisher, lambda: 0.0))
    channel.inbox.append(add("a"))
    core.step()
    assert publisher.events == [AllBlocksCleared()]
    core.step()
    [_, stored] = publisher.events
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == [1, 2, 3, 1]
    assert publisher.num_sent_before == [1, 2]


def test_a_core_that_is_to_sleep_drops_what_is_under_way_and_says_that_nothing_is_cached(make_core, channel, publisher):
    core = make_core(CountingRunner(), ahead=1, feed=feed_of(publisher, lambda: 0.0))
    channel.inbox.extend([add("a", max_tokens=100), add("b", max_tokens=100)])
    for _ in range(8):
        core.step()
    num_tokens = len(tokens_of(channel, "a"))
    channel.inbox.append(Sleep(level=2))
    assert core.run() == 2
    stored = {block for event in publisher.events if isinstance(event, BlockStored) for block in event.block_hashes}
    removed = {block for event in publisher.events if isinstance(event, BlockRemoved) for block in event.block_hashes}
    assert stored == removed != set()
    assert channel.broadcasts[-1].stats.num_running == channel.broadcasts[-1].stats.num_blocks_used == 0
    assert len(tokens_of(channel, "a")) <= num_tokens + 2
    channel.inbox.extend([add("c", max_tokens=2), Sleep(level=1)])
    assert core.run() == 1, "and it may go on, and sleep again"


def test_published_events_are_counted_when_the_core_falls_asleep(make_core, channel, publisher):
    core = make_core(CountingRunner(), ahead=0, feed=feed_of(publisher, lambda: 0.0))
    channel.inbox.append(add("a"))
    for _ in range(3):
        core.step()
    assert channel.broadcasts[-1].stats.num_kv_events == len(publisher.events) == 2


def test_a_report_names_the_requests_that_came_and_follows_what_they_do(make_core, channel, publisher):
    seconds = iter(range(100))
    core = make_core(CountingRunner(), ahead=0, feed=feed_of(publisher, lambda: float(next(seconds)), load_hz=20))
    channel.inbox.extend([add("a", max_tokens=2, http_request_id="x-1"), add("b", max_tokens=1)])
    for _ in range(2):
        core.step()
    figures = [(report.num_running, report.kv_used_tokens, report.arrived) for report in publisher.reports]
    assert figures == [(1, 4, ["x-1"]), (0, 0, [])]


def test_a_core_that_owes_a_report_sleeps_no_longer_than_until_it_is_due(make_core, channel, publisher):
    now = [0.0]
    core = make_core(CountingRunner(), ahead=0, feed=feed_of(publisher, lambda: now[0], load_hz=20))
    channel.inbox.append(add("a", max_tokens=2))
    for _ in range(2):
        core.step()
    assert [report.num_running for report in publisher.reports] == [1]
    now[0] = 0.05
    core.step()
    assert channel.timeouts[-1] == 0.0
    assert [report.num_running for report in publisher.reports] == [1, 0]
    core.step()
    assert channel.timeouts[-1] is None, "an idle core that owes nothing waits without a limit"
    assert len(publisher.reports) == 2


def steps(core: EngineCore, number: int) -> None:
    for _ in range(number):
        core.step()


def test_a_core_whose_pages_others_hold_sleeps_until_they_let_go(make_core, channel):
    agent = MemoryAgent()
    core = make_core(CountingRunner(), ahead=0, agent=agent)
    params = KvTransferParams(do_remote_decode=True)
    prefill = add("p", max_tokens=1, prompt_token_ids=list(range(61)), kv_transfer_params=params)
    channel.inbox.append(prefill)
    steps(core, 6)
    assert outputs_of(channel, "p")[-1].kv_transfer_params is not None
    assert channel.sent[-1][1].stats.transfers.num_leased_blocks == 15
    channel.inbox.append(add("a", prompt_token_ids=[9] * 8))
    steps(core, 3)
    assert not tokens_of(channel, "a")
    assert channel.timeouts[-1] is None, "there is work, but nothing to be done about it"
    agent.events.append(OfferEnded("p", "pulled"))
    steps(core, 6)
    assert len(tokens_of(channel, "a")) == 3


@pytest.mark.parametrize("end", [AbortRequests(aborts=[Abort("d")]), ApiGone(0)], ids=["abort", "api gone"])
def test_who_keeps_kv_for_a_request_that_waits_for_its_grammar_hears_of_its_end(
    make_core, channel, grammar_executor, end
):
    params = KvTransferParams(do_remote_prefill=True, remote_host="peer", remote_port=1, transfer_id="t")
    posted = []
    for grammar in (None, "slow"):
        agent = MemoryAgent()
        core = make_core(CountingRunner(), ahead=0, agent=agent, executor=grammar_executor)
        channel.inbox.append(add("d", prompt_token_ids=list(range(9)), kv_transfer_params=params, grammar=grammar))
        steps(core, 1)
        channel.inbox.append(end)
        steps(core, 1)
        posted.append(agent.posted)
    without, held = posted
    assert isinstance(without[-1], CancelPull)
    assert without[-1] in held


def test_a_held_request_costs_no_turns_and_goes_on_when_its_pull_has_ended(make_core, channel):
    agent = MemoryAgent()
    core = make_core(CountingRunner(), ahead=0, agent=agent)
    params = KvTransferParams(do_remote_prefill=True, remote_host="peer", remote_port=1, transfer_id="t")
    channel.inbox.append(add("d", prompt_token_ids=list(range(9)), kv_transfer_params=params))
    steps(core, 2)
    assert channel.timeouts[-1] is None
    assert channel.broadcasts[-1].stats.num_held == 1
    agent.events.append(PullEnded("d", 2))
    steps(core, 5)
    assert outputs_of(channel, "d")[0].num_cached_tokens == 0
    assert len(tokens_of(channel, "d")) == 3
