"""The step loop over a channel and a device that are in memory."""

import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from kvasir_runtime.engine.core import EngineCore
from kvasir_runtime.engine.messages import AbortRequests, AddRequest, SamplingParams, Shutdown, StepOutputs
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.scheduling.batch import BatchOutput, ScheduledBatch
from kvasir_runtime.scheduling.scheduler import SchedulerLimits, make_scheduler


class MemoryChannel:
    """Hands out what was queued; waiting for ever on nothing is the test's mistake."""

    def __init__(self) -> None:
        self.inbox: deque = deque()
        self.sent: list[tuple[int, StepOutputs]] = []
        self.broadcasts: list[StepOutputs] = []
        self.timeouts: list[float | None] = []

    def receive(self, timeout_seconds: float | None) -> list:
        self.timeouts.append(timeout_seconds)
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, api_index: int, message: StepOutputs) -> None:
        self.sent.append((api_index, message))

    def broadcast(self, message: StepOutputs) -> None:
        self.broadcasts.append(message)


class CountingRunner:
    """The n-th step samples token n for everyone; steps named in `fails` raise."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.num_steps = 0
        self.fails = fails
        self.threads: set[str] = set()

    def run(self, batch: ScheduledBatch) -> BatchOutput:
        self.num_steps += 1
        self.threads.add(threading.current_thread().name)
        if self.num_steps in self.fails:
            raise RuntimeError("device fell over")
        num_samples = sum(share.samples for share in batch.requests)
        return BatchOutput([self.num_steps] * num_samples, [None] * num_samples)


@pytest.fixture
def channel() -> MemoryChannel:
    return MemoryChannel()


@pytest.fixture
def make_core(channel: MemoryChannel) -> Iterator[Callable[..., EngineCore]]:
    executors: list[Executor] = []

    def make(runner: CountingRunner, *, ahead: bool = True) -> EngineCore:
        executors.append(Executor(runner))
        scheduler = make_scheduler(SchedulerLimits(4, 32), policy="fcfs", num_blocks=16, enable_prefix_caching=True)
        return EngineCore(executors[-1], channel, scheduler, block_size=4, max_model_len=64, one_step_ahead=ahead)

    yield make
    for executor in executors:
        executor.close()


def add(request_id: str, *, api_index: int = 0, max_tokens: int = 3) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return AddRequest(
        request_id=request_id, api_index=api_index, prompt_token_ids=[1, 2, 3], sampling=sampling, arrival_time=0.0
    )


def tokens_of(channel: MemoryChannel, request_id: str) -> list[int]:
    return [
        token for _, message in channel.sent for output in message.outputs
        if output.request_id == request_id for token in output.new_token_ids
    ]  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_is_stepped_to_its_end_and_then_the_core_waits(make_core, channel, ahead):
    runner = CountingRunner()
    core = make_core(runner, ahead=ahead)
    channel.inbox.append(add("a"))
    for _ in range(6):
        core.step()
    assert tokens_of(channel, "a") == [1, 2, 3]
    assert channel.timeouts[-1] is None, "an idle core waits without a limit"
    assert 0.0 in channel.timeouts, "a busy core does not wait for messages"
    assert runner.num_steps == 3


def test_one_step_ahead_hands_the_next_step_over_before_taking_results(make_core, channel):
    core = make_core(CountingRunner())
    channel.inbox.append(add("a"))
    core.step()
    assert channel.sent == []
    core.step()
    assert tokens_of(channel, "a") == [1]


def test_outputs_go_to_the_api_process_of_their_request(make_core, channel):
    core = make_core(CountingRunner(), ahead=False)
    channel.inbox.extend([add("a", api_index=0), add("b", api_index=1)])
    core.step()
    assert {(index, message.outputs[0].request_id) for index, message in channel.sent} == {(0, "a"), (1, "b")}


def test_when_the_last_request_ends_every_api_process_hears_of_the_idle_state(make_core, channel):
    core = make_core(CountingRunner(), ahead=False)
    channel.inbox.append(add("a", max_tokens=1))
    core.step()
    assert channel.broadcasts[-1].stats.num_running == 0
    assert channel.broadcasts[-1].stats.num_steps == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_an_abort_ends_a_request_without_a_word(make_core, channel, ahead):
    core = make_core(CountingRunner(), ahead=ahead)
    channel.inbox.append(add("a", max_tokens=50))
    for _ in range(3):
        core.step()
    num_tokens = len(tokens_of(channel, "a"))
    channel.inbox.append(AbortRequests(request_ids=["a"]))
    for _ in range(3):
        core.step()
    assert len(tokens_of(channel, "a")) == num_tokens
    assert channel.timeouts[-1] is None


def test_a_failing_step_ends_its_requests_with_an_error_and_later_ones_are_served(make_core, channel):
    core = make_core(CountingRunner(fails=(1,)), ahead=False)
    channel.inbox.append(add("bad"))
    core.step()
    channel.inbox.append(add("good", max_tokens=2))
    for _ in range(2):
        core.step()
    (failed,) = [output for _, message in channel.sent for output in message.outputs if output.request_id == "bad"]
    assert failed.finish_reason == "error"
    assert "device fell over" in failed.error
    assert tokens_of(channel, "good") == [2, 3]


def test_a_device_that_fails_again_and_again_is_given_up(make_core, channel):
    core = make_core(CountingRunner(fails=(1, 2, 3)), ahead=False)
    channel.inbox.append(add("a"))
    core.step()
    channel.inbox.append(add("b"))
    core.step()
    channel.inbox.append(add("c"))
    with pytest.raises(RuntimeError, match="device fell over"):
        core.step()


def test_shutdown_ends_the_loop(make_core, channel):
    core = make_core(CountingRunner())
    channel.inbox.append(Shutdown())
    core.run()
    assert channel.timeouts == [None]


def test_the_device_is_driven_by_one_thread_of_its_own(make_core, channel):
    runner = CountingRunner()
    core = make_core(runner)
    channel.inbox.append(add("a"))
    for _ in range(5):
        core.step()
    assert len(runner.threads) == 1
    assert threading.current_thread().name not in runner.threads
