"""Latencies over the SLO call for replicas as long as those help."""

from dataclasses import replace

import pytest

from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.latency import (
    GIVE_UP_SECONDS,
    Latency,
    Trial,
    attainable,
    judged,
    latency_need,
    standing_trial,
)

ITL = ScalingReason.INTER_TOKEN_LATENCY
TTFT = ScalingReason.TIME_TO_FIRST_TOKEN


def itl(ratio: float) -> Latency:
    return Latency(ITL, ratio, 1.0)


@pytest.mark.parametrize(("ratio", "replicas"), [(1.1, None), (1.2, 4.8), (1.25, 5.0), (5.0, 5.0)])
def test_more_are_needed_over_the_tolerance_and_at_most_a_quarter_more(ratio, replicas):
    need = latency_need([itl(ratio)], 4)
    assert (None if need is None else need.replicas) == replicas


def test_the_worst_latency_decides():
    need = latency_need([itl(1.2), Latency(TTFT, 3.0, 2.0)], 4)
    assert need is not None
    assert need.reason is TTFT


def test_its_own_prefill_is_no_shorter_with_more_replicas():
    assert Latency(TTFT, 1.0, 2.0, floor_seconds=0.6).with_replicas(4, 2) == pytest.approx((0.6 + 0.4 * 2) / 2)
    assert Latency(TTFT, 1.0, 2.0, floor_seconds=5.0).with_replicas(4, 2) == 0.5


@pytest.mark.parametrize(("ratio", "is_in_vain"), [(1.79, False), (1.8, True), (2.5, True)])
def test_a_trial_that_brings_less_than_a_tenth_was_in_vain(ratio, is_in_vain):
    trial = judged(Trial(ITL, 2.0, 10), [itl(ratio)], now=10)
    assert trial == (Trial(ITL, 2.0, 10, 10) if is_in_vain else None)


def test_after_a_trial_in_vain_the_slo_is_left_alone_for_a_while():
    given_up = Trial(ITL, 2.0, 10, in_vain_since=10)
    assert attainable(given_up, [itl(2.0), Latency(TTFT, 3.0, 2.0)]) == [Latency(TTFT, 3.0, 2.0)]
    assert judged(given_up, [itl(2.0)], now=10 + GIVE_UP_SECONDS - 1) == given_up
    assert judged(given_up, [itl(2.0)], now=10 + GIVE_UP_SECONDS) is None
    assert judged(given_up, [itl(1.0)], now=11) is None
    assert judged(given_up, [itl(1.01)], now=11) == given_up


def test_a_trial_that_runs_guards_its_slo_still():
    assert attainable(Trial(ITL, 2.0, 10), [itl(2.0)]) == [itl(2.0)]


def test_an_slo_shorter_than_one_prefill_is_none():
    assert attainable(None, [Latency(TTFT, 3.0, 2.0, floor_seconds=2.0)]) == []
    kept = Latency(TTFT, 3.0, 2.0, floor_seconds=1.9)
    assert attainable(None, [kept, replace(kept, floor_seconds=2.1)]) == [kept]


def test_a_trial_is_not_judged_before_its_time() -> None:
    trial = Trial(ITL, 2.0, judged_at=10)
    assert judged(trial, [itl(2.0)], now=9) == trial
    assert judged(trial, [itl(1.0)], now=9) is None


@pytest.mark.parametrize(("ratio", "is_given_up"), [(2.2, True), (2.21, False)])
def test_a_latency_that_gets_worse_is_no_longer_given_up(ratio: float, is_given_up: bool) -> None:
    given_up = Trial(ITL, 2.0, 10, in_vain_since=10)
    assert judged(given_up, [itl(ratio)], now=11) == (given_up if is_given_up else None)


def test_a_latency_over_its_slo_for_which_nothing_is_tried_is_given_up_in_time() -> None:
    standing = standing_trial(None, [itl(1.05)], now=10)
    assert standing == Trial(ITL, 1.05, 10 + GIVE_UP_SECONDS)
    assert standing_trial(standing, [itl(1.05)], now=20) is standing
    assert judged(standing, [itl(1.05)], now=10 + GIVE_UP_SECONDS) == replace(
        standing, in_vain_since=10 + GIVE_UP_SECONDS
    )


@pytest.mark.parametrize("latencies", [[], [itl(1.0)]])
def test_where_the_slo_is_kept_there_is_nothing_to_try(latencies: list[Latency]) -> None:
    assert standing_trial(None, latencies, now=10) is None
