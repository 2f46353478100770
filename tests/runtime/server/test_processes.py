"""A SIGTERM that comes while API processes are being started reaches those that were, and ends the starting."""

import signal
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvasir_runtime.server import processes


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Process:
    """`is_told_in_start`: SIGTERM comes before it can be terminated."""

    def __init__(self, *, is_told_in_start: bool = False) -> None:
        self._is_told_in_start = is_told_in_start
        self._is_alive = False
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("started")
        if self._is_told_in_start:
            signal.raise_signal(signal.SIGTERM)
        self._is_alive = True

    def is_alive(self) -> bool:
        return self._is_alive

    def terminate(self) -> None:
        self.events.append("terminated")


def start(*all_processes: Process) -> list[list[str]]:
    """What becomes of each."""
    started = processes._start(cast(Any, all_processes))
    assert started == [process for process in all_processes if process.events]
    return [process.events for process in all_processes]


def test_a_sigterm_amid_the_start_terminates_what_has_started_and_starts_no_more() -> None:
    assert start(Process(), Process(is_told_in_start=True), Process()) == [
        ["started", "terminated"],
        ["started", "terminated"],
        [],
    ]


def test_a_sigterm_after_the_start_is_passed_on_each_time() -> None:
    """The second tells them to end at once."""
    one = Process()
    assert start(one) == [["started"]]
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert one.events == ["started", "terminated", "terminated"]
