"""The oracle of the autoscaling benchmark: it knows what comes, and pays for no more than that."""

from types import SimpleNamespace
from typing import cast

import pytest
from benchmarks.autoscaling.oracle import BIN_SECONDS, Planned, oracle, plan
from benchmarks.autoscaling.simulation import Setting, simulate
from benchmarks.autoscaling.traffic import shaped
from benchmarks.autoscaling.view import FleetView
from benchmarks.routing.engine import EngineModel

SETTING = Setting(EngineModel(2500.0, 32768.0, 60_000, 128, 0.025, 2e-7), 3.0, 0.1, startup_seconds=60.0)
STEP = shaped("step", lambda at: 7.0 if 300 <= at < 600 else 1.0, duration_seconds=900.0)
FREE, DEAR = 0.0, 20.0
FIRST_CHOICE = 3
"""The first half minute by which a replica can have started that is asked for after the begin."""


def test_what_comes_is_served_from_its_first_moment_on() -> None:
    numbers = plan(STEP, DEAR, SETTING)
    before, during, after = numbers[300 // 30 - 1], numbers[300 // 30], numbers[-1]
    assert before < during > after
    assert simulate(STEP, SETTING, oracle(STEP, DEAR, SETTING)).attainment > 0.98


def test_a_request_that_is_worth_nothing_is_given_nothing() -> None:
    assert set(plan(STEP, FREE, SETTING)[FIRST_CHOICE:]) == {1}


def test_dearer_requests_are_kept_more_often_and_for_more() -> None:
    cheap, dear = (simulate(STEP, SETTING, oracle(STEP, price, SETTING)) for price in (0.2, DEAR))
    assert cheap.attainment < dear.attainment
    assert cheap.replica_hours < dear.replica_hours


def test_a_pause_shorter_than_a_start_lets_no_replica_go() -> None:
    def in_pause(seconds: float) -> set[int]:
        trace = shaped("p", lambda at: 0.1 if 300 <= at < 300 + seconds else 5.0, duration_seconds=900.0)
        return set(plan(trace, DEAR, SETTING)[10 : 10 + int(seconds / BIN_SECONDS)])

    assert min(in_pause(30.0)) > 1
    assert 1 in in_pause(300.0)


@pytest.mark.parametrize(("now", "expected"), [(30.0, 1), (60.0, 3), (120.0, 3), (150.0, 2), (600.0, 2)])
def test_replicas_are_asked_for_as_long_before_as_they_take_to_start(now: float, expected: int) -> None:
    view = cast(FleetView, SimpleNamespace(now=now))
    assert Planned((1, 1, 1, 1, 3, 2), startup_seconds=60.0).wanted({"role": view}) == {"role": expected}
