import threading

import pytest

from kvasir_runtime.errors import StepSkippedError
from kvasir_runtime.execution.executor import Executor


class Runner:
    """Steps are numbers; those in `fails` raise in the half named."""

    def __init__(self, fails=(), idle_pieces=0):
        self.fails = dict(fails)
        self.idle_pieces = idle_pieces
        self.log = []
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, plan):
        self.gate.wait()
        self.log.append(("forward", plan))
        self._plan = plan
        if self.fails.get(plan) == "forward":
            raise RuntimeError(f"step {plan} fell over")

    def sample(self):
        self.log.append(("sample", self._plan))
        if self.fails.get(self._plan) == "sample":
            raise RuntimeError(f"step {self._plan} fell over")
        return self._plan

    def use_idle_time(self):
        self.idle_pieces -= self.idle_pieces > 0
        return self.idle_pieces > 0


@pytest.fixture
def start():
    executors = []

    def start(runner, **options):
        executors.append(Executor(runner, **options))
        return executors[-1]

    yield start
    for executor in executors:
        executor.close()


def step(executor, plan):
    executor.forward(plan)
    return executor.sample()


def test_steps_run_in_order_and_their_second_half_may_come_later(start):
    runner = Runner()
    executor = start(runner)
    executor.forward(1)
    first = executor.sample()
    second = step(executor, 2)
    assert (first.result(5), second.result(5)) == (1, 2)
    assert runner.log == [("forward", 1), ("sample", 1), ("forward", 2), ("sample", 2)]


@pytest.mark.parametrize("half", ["forward", "sample"])
def test_steps_queued_behind_a_failed_one_are_skipped_until_recovery(start, half):
    runner = Runner(fails={1: half})
    executor = start(runner)
    runner.gate.clear()
    failed, behind, last = step(executor, 1), step(executor, 2), step(executor, 3)
    runner.gate.set()
    assert str(failed.exception(5)) == "step 1 fell over"
    assert isinstance(behind.exception(5), StepSkippedError)
    assert isinstance(last.exception(5), StepSkippedError)
    assert ("forward", 2) not in runner.log
    executor.recover()
    assert step(executor, 4).result(5) == 4


def test_every_failure_is_told_however_soon_the_one_before_was_recovered_from(start):
    runner = Runner(fails={1: "forward", 2: "forward"})
    executor = start(runner)
    runner.gate.clear()
    first = step(executor, 1)
    first.add_done_callback(lambda _: executor.recover())  # runs as soon as the failure is told
    runner.gate.set()
    assert str(first.exception(5)) == "step 1 fell over"
    assert str(step(executor, 2).exception(5)) == "step 2 fell over"


def test_the_thread_is_prepared_before_the_first_step(start):
    threads = []
    executor = start(Runner(), prepare_thread=lambda: threads.append(threading.current_thread().name))
    step(executor, 1).result(5)
    assert threads == ["device"]


@pytest.mark.parametrize("fails", [False, True])
def test_idle_time_is_offered_piece_by_piece_and_steps_go_on_whatever_comes_of_it(start, fails):
    runner = Runner(idle_pieces=3)
    is_used = threading.Event()

    def use_idle_time():
        if fails:
            is_used.set()
            raise RuntimeError("no memory for a graph")
        has_more = Runner.use_idle_time(runner)
        if not has_more:
            is_used.set()
        return has_more

    runner.use_idle_time = use_idle_time
    executor = start(runner)
    assert step(executor, 0).result(5) == 0
    assert runner.idle_pieces == 3, "not before the engine says that it is idle"
    executor.use_idle_time()
    assert is_used.wait(5)
    assert step(executor, 1).result(5) == 1
    assert runner.idle_pieces == (3 if fails else 0)
