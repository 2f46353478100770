"""Processes of one engine see whether the others live."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir_runtime.heartbeat import Heartbeats, api_heartbeats, beating, core_heartbeats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def process(tmp_path: Path, clock: Clock) -> Callable[[int], Heartbeats]:
    """Of three; each maps the file itself."""
    return lambda index: Heartbeats(tmp_path / "beats", 3, index, clock)


def test_who_has_not_begun_is_not_missed(process: Callable[[int], Heartbeats]) -> None:
    assert process(0).silence_of_others_seconds() == 0.0


def test_the_longest_silence_counts(process: Callable[[int], Heartbeats], clock: Clock) -> None:
    for index in range(3):
        process(index).beat()
        clock.now += 2.0
    assert [process(index).silence_of_others_seconds() for index in range(3)] == [4.0, 6.0, 6.0]


def test_who_has_left_is_not_missed(process: Callable[[int], Heartbeats], clock: Clock) -> None:
    other = process(1)
    other.beat()
    clock.now += 60.0
    assert process(0).silence_of_others_seconds() == 60.0
    other.leave()
    assert process(0).silence_of_others_seconds() == 0.0


def test_the_core_beats_beside_its_work_and_leaves_at_its_end(tmp_path: Path) -> None:
    api, core = api_heartbeats(tmp_path, 2, 1, 0), core_heartbeats(tmp_path, 2, 1, 0)
    core.beat()
    threads = threading.active_count()
    with beating(core):
        assert threading.active_count() == threads + 1
        assert 0.0 < api.silence_of_others_seconds() < 60.0
    assert api.silence_of_others_seconds() == 0.0
    assert threading.active_count() == threads
