"""A SIGTERM reaches every API process that was started, and one that fails ends the others."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from kvasir_runtime.errors import ServerUnavailableError
from kvasir_runtime.server.admission import Admission, forget_process
from kvasir_runtime.server.processes import supervise

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Process:
    """Runs until it is terminated. `is_told_in_start`: SIGTERM comes before that can be."""

    def __init__(self, *, is_told_in_start: bool = False) -> None:
        self._is_told_in_start = is_told_in_start
        self.sentinel, self._end = os.pipe()
        self.exitcode: int | None = None
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("started")
        if self._is_told_in_start:
            signal.raise_signal(signal.SIGTERM)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def terminate(self) -> None:
        self.events.append("terminated")
        self.end(0)

    def end(self, exit_code: int) -> None:
        self.exitcode = exit_code
        os.write(self._end, b"x")

    def join(self) -> None:
        assert self.exitcode is not None, "was waited for"
        os.close(self.sentinel)
        os.close(self._end)


class Busy(Process):
    """Told to stop it takes until it is told again, which is at once."""

    def terminate(self) -> None:
        self.events.append("terminated")
        if len(self.events) == 2:
            signal.raise_signal(signal.SIGTERM)
        else:
            self.end(0)


class Failing(Process):
    def start(self) -> None:
        super().start()
        self.end(3)


class Signalling(Process):
    """Ends by itself; SIGTERM comes when that is noticed."""

    def start(self) -> None:
        super().start()
        self.end(0)

    def join(self) -> None:
        super().join()
        signal.raise_signal(signal.SIGTERM)


def supervised(*processes: Process) -> tuple[int, list[list[str]]]:
    """(the exit status, what becomes of each)."""

    def give_up_requests(api_index: int) -> None:
        processes[api_index].events.append("given up")

    return supervise(cast(Any, processes), give_up_requests), [process.events for process in processes]


def test_a_sigterm_amid_the_start_terminates_what_has_started_and_starts_no_more() -> None:
    ended = ["started", "terminated"]
    assert supervised(Process(), Process(is_told_in_start=True), Process()) == (0, [ended, ended, []])


def test_a_sigterm_after_the_start_is_passed_on_each_time() -> None:
    """The second tells them to end at once."""
    ended = ["started", "terminated", "terminated"]
    assert supervised(Signalling(), Busy()) == (0, [["started"], ended])


def test_when_one_fails_the_others_are_drained_and_the_status_says_so() -> None:
    assert supervised(Process(), Failing()) == (1, [["started", "terminated"], ["started", "given up"]])


def test_what_a_dead_process_was_answering_takes_no_places(tmp_path: Path) -> None:
    dead, living = (Admission(tmp_path, 2, index, max_sequences=8) for index in range(2))
    with ExitStack() as held:
        held.enter_context(dead.admit())
        held.enter_context(dead.hold(8))
        with pytest.raises(ServerUnavailableError), living.hold(1):
            pass
        forget_process(tmp_path, 2, 0)
        with living.admit(), living.hold(8):
            assert living.num_in_flight == 1
