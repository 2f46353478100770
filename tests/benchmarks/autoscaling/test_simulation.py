"""The fleet and the rules of the autoscaling benchmark, on traces of a few minutes."""

import pytest
from benchmarks.autoscaling.lineup import LINEUP, MOST_REPLICAS
from benchmarks.autoscaling.simulation import Setting, simulate
from benchmarks.autoscaling.traffic import SHAPES, shaped
from benchmarks.autoscaling.view import FleetView
from benchmarks.routing.engine import EngineModel
from benchmarks.routing.trace import Trace

SETTING = Setting(EngineModel(2500.0, 32768.0, 60_000, 128, 0.025, 2e-7), 3.0, 0.1, startup_seconds=60.0)


class Planned:
    """Wants what a plan says: (seconds, replicas), in order; `seen` is the number that served each time."""

    interval_seconds = 10.0

    def __init__(self, *plan: tuple[float, int]) -> None:
        self._plan = plan
        self.seen: list[tuple[float, int]] = []

    def wanted(self, view: FleetView) -> int:
        self.seen.append((view.now, len(view.replicas)))
        return next((replicas for at, replicas in reversed(self._plan) if view.now >= at), view.wanted)


def steady(per_second: float, seconds: float = 300.0) -> Trace:
    return shaped("steady", lambda at: per_second, duration_seconds=seconds)


def test_enough_replicas_keep_every_promise_and_cost_their_time() -> None:
    trace = steady(1.0)
    outcome = simulate(trace, SETTING, Planned())
    assert outcome.attainment == 1.0
    assert 2 * trace.requests[-1].arrived / 3600 <= outcome.replica_hours < 2 * 330 / 3600
    assert (outcome.peak, outcome.num_changes, outcome.num_turns) == (2, 0, 0)


def test_too_few_replicas_keep_few() -> None:
    assert simulate(steady(6.0), SETTING, Planned()).attainment < 0.5


def test_a_replica_serves_once_it_has_started_and_one_that_drains_takes_nothing_more() -> None:
    rule = Planned((50, 3), (200, 1))
    outcome = simulate(steady(1.0), SETTING, rule)
    serving = dict(rule.seen)
    assert (serving[100.0], serving[120.0], serving[210.0]) == (2, 3, 1)
    assert (outcome.num_changes, outcome.num_turns) == (2, 1)
    assert outcome.wasted_hours == pytest.approx(0, abs=0.07)
    assert outcome.wasted_hours > 0


def test_requests_are_held_while_nothing_serves() -> None:
    outcome = simulate(steady(0.5), SETTING, Planned((10, 0), (20, 2)))
    assert 0.5 < outcome.attainment < 0.95


def test_a_shape_has_as_many_requests_as_it_says() -> None:
    trace = shaped("step", SHAPES["step"])
    assert len(trace.requests) == pytest.approx(2.0 * 2100 + 7.0 * 1500, rel=0.05)


@pytest.mark.parametrize("name", LINEUP)
def test_every_rule_answers_a_step_with_more_replicas_within_bounds(name: str) -> None:
    make, thresholds = LINEUP[name]
    trace = shaped("step", lambda at: 9.0 if at > 60 else 1.0, duration_seconds=200.0)
    outcome = simulate(trace, SETTING, make(thresholds[0], SETTING))
    assert 2 < outcome.peak <= MOST_REPLICAS
