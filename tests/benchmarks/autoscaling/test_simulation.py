"""The fleets and the rules of the autoscaling benchmark, on traces of a few minutes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from benchmarks.autoscaling.lineup import LINEUP, MOST_REPLICAS
from benchmarks.autoscaling.rule import Rules
from benchmarks.autoscaling.simulation import DECODE, PREFILL, SERVE, Setting, simulate
from benchmarks.autoscaling.traffic import DRAWN, SHAPES, load, shaped
from benchmarks.autoscaling.view import FleetView
from benchmarks.routing.engine import EngineModel
from benchmarks.routing.trace import Trace, TraceRequest

SETTING = Setting(EngineModel(2500.0, 32768.0, 60_000, 128, 0.025, 2e-7), 3.0, 0.1, startup_seconds=60.0)
SPLIT, SLEEPY = replace(SETTING, is_split=True), replace(SETTING, can_sleep=True)


class Planned:
    """Wants what a plan says: (seconds, replicas), in order; `seen` is the number that served each time."""

    interval_seconds = 10.0

    def __init__(self, *plan: tuple[float, int]) -> None:
        self._plan = plan
        self.seen: list[tuple[float, int]] = []

    def wanted(self, views: Mapping[str, FleetView]) -> Mapping[str, int]:
        view = next(iter(views.values()))
        self.seen.append((view.now, len(view.replicas)))
        replicas = next((replicas for at, replicas in reversed(self._plan) if view.now >= at), None)
        return {role: each.wanted if replicas is None else replicas for role, each in views.items()}


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


class Watched(Planned):
    """And the rate at which prompt tokens arrived, each time."""

    def __init__(self, *plan: tuple[float, int]) -> None:
        super().__init__(*plan)
        self.rates: dict[float, float] = {}

    def wanted(self, views: Mapping[str, FleetView]) -> Mapping[str, int]:
        view = views[SERVE]
        self.rates[view.now] = view.uncached_tokens_per_second
        return super().wanted(views)


def test_held_requests_have_arrived_when_they_came_and_not_when_a_replica_serves() -> None:
    rule = Watched((10, 0), (20, 1))
    simulate(Trace("even", 64, tuple(requests(1.0, 300, 60, 1))), SETTING, rule)
    assert {at: rate for at, rate in rule.rates.items() if at >= 60} == pytest.approx(
        {at: 60.0 for at in rule.rates if at >= 60}, rel=0.04
    )


def test_a_shape_has_as_many_requests_as_it_says() -> None:
    trace = shaped("step", SHAPES["step"])
    assert len(trace.requests) == pytest.approx(2.0 * 2100 + 7.0 * 1500, rel=0.05)


@pytest.mark.parametrize("name", LINEUP)
def test_every_rule_answers_a_step_with_more_replicas_within_bounds(name: str) -> None:
    make, thresholds = LINEUP[name]
    trace = shaped("step", lambda at: 9.0 if at > 60 else 1.0, duration_seconds=200.0)
    outcome = simulate(trace, SETTING, make(thresholds[0], SETTING))
    assert 2 < outcome.peak <= MOST_REPLICAS


class Noted:
    """Rules, and all that they wanted."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.wanted_by_role: dict[str, list[int]] = {}

    @property
    def interval_seconds(self) -> float:
        return self._rules.interval_seconds

    def wanted(self, views: Mapping[str, FleetView]) -> Mapping[str, int]:
        wanted = self._rules.wanted(views)
        for role, replicas in wanted.items():
            self.wanted_by_role.setdefault(role, []).append(replicas)
        return wanted


def rules_of(name: str, threshold: float, setting: Setting) -> Noted:
    return Noted(LINEUP[name][0](threshold, setting))


def requests(every: float, seconds: float, num_input: int, num_output: int, begin: float = 0.0) -> list[TraceRequest]:
    """One every `every` seconds; prompts share nothing."""
    num = int(seconds / every)
    size = -(-num_input // 64)
    first = int(begin) * 1_000_000
    return [
        TraceRequest(begin + every * i, num_input, num_output, tuple(range(first + i * size, first + (i + 1) * size)))
        for i in range(1, num + 1)
    ]


def test_prefill_and_decode_have_a_fleet_each_and_the_first_token_comes_after_both() -> None:
    trace = steady(1.0)
    outcome = simulate(trace, SPLIT, Planned())
    assert outcome.attainment == 1.0
    assert outcome.peak == 4
    assert 4 * trace.requests[-1].arrived / 3600 <= outcome.replica_hours < 4 * 330 / 3600
    assert simulate(trace, replace(SPLIT, transfer_latency_seconds=4.0), Planned()).attainment == 0.0


@pytest.mark.parametrize(
    ("num_input", "num_output", "busy", "lazy"), [(2000, 4, PREFILL, DECODE), (64, 800, DECODE, PREFILL)]
)
def test_each_role_is_counted_for_itself(num_input: int, num_output: int, busy: str, lazy: str) -> None:
    rules = rules_of("kvasir", 1.0, SPLIT)
    simulate(Trace("one kind", 64, tuple(requests(0.2, 400, num_input, num_output))), SPLIT, rules)
    assert max(rules.wanted_by_role[busy]) > 2
    assert max(rules.wanted_by_role[lazy]) == 2


GAP = Trace("gap", 64, (*requests(1.0, 60, 200, 20), *requests(1.0, 60, 200, 20, begin=900.0)))
"""Nothing comes for a quarter of an hour."""


@pytest.mark.parametrize(("name", "least", "most"), [("kvasir", 60, 61), ("keda-queue", 60, 75)])
def test_a_request_at_zero_waits_for_a_start_and_its_wake_is_counted(name: str, least: float, most: float) -> None:
    rules = rules_of(name, 1.0, SLEEPY)
    outcome = simulate(GAP, SLEEPY, rules)
    assert rules.wanted_by_role[SERVE].count(0) > 0
    [wake_seconds] = outcome.wake_seconds
    assert least <= wake_seconds <= most
    assert outcome.wake_p50_seconds == wake_seconds


def test_who_may_not_sleep_keeps_one() -> None:
    for name, setting in (("kvasir", SETTING), ("keda-queue", SETTING), ("hpa-kv-usage", SLEEPY)):
        rules = rules_of(name, 1.0, setting)
        assert simulate(GAP, setting, rules).wake_seconds == ()
        assert min(rules.wanted_by_role[SERVE]) == 1


def test_both_roles_sleep_and_wake_together() -> None:
    setting = replace(SPLIT, can_sleep=True)
    rules = rules_of("kvasir", 1.0, setting)
    outcome = simulate(GAP, setting, rules)
    assert len(outcome.wake_seconds) == 1
    prefill, decode = (rules.wanted_by_role[role] for role in (PREFILL, DECODE))
    assert [one == 0 for one in prefill] == [one == 0 for one in decode]
    assert outcome.attainment > 0.4  # the requests before the gap are kept, those in the wake are not


def test_an_slo_that_cannot_be_met_does_not_keep_what_a_burst_has_asked_for() -> None:
    setting = replace(SETTING, itl_seconds=0.01)  # less than a step takes
    trace = shaped("burst", lambda at: 6.0 if at < 300 else 0.5, duration_seconds=2400.0)
    rules = rules_of("kvasir", 1.0, setting)
    assert simulate(trace, setting, rules).attainment < 0.1
    wanted = rules.wanted_by_role[SERVE]
    assert max(wanted) > 3
    assert wanted[-1] <= 2


@pytest.mark.parametrize("name", DRAWN)
def test_bursts_of_long_prompts_are_drawn_by_the_seed(name: str) -> None:
    trace, same, other = (load(name, Path(), seed) for seed in (3, 3, 4))
    assert trace == same
    assert trace != other
    assert median(each.num_input_tokens for each in trace.requests) == pytest.approx(2000, rel=0.1)
    assert median(each.num_output_tokens for each in trace.requests) == pytest.approx(30, rel=0.1)
    by_minute = Counter(int(each.arrived / 60) for each in trace.requests)
    busiest, quietest = max(by_minute.values()), min(by_minute[minute] for minute in range(60))
    assert busiest > 8 * quietest
