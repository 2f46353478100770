"""A wake lasts from the first request that finds no engine to the first that is sent to one."""

import pytest

from kvasir_router.service.service import BUCKETS_SECONDS, Wakes


def num_within(wakes: Wakes, bound: str) -> float:
    return dict(wakes.buckets())[bound]


def test_the_first_request_that_waits_counts_and_a_wake_is_counted_once() -> None:
    wakes = Wakes()
    wakes.asked_for(100.0, 60.0)
    wakes.asked_for(115.0, 60.0)
    wakes.sent(120.0, has_waited=True)
    wakes.sent(121.0, has_waited=True)
    assert wakes.sum_seconds == 20.0
    assert (num_within(wakes, "15.0"), num_within(wakes, "20.0"), num_within(wakes, "+Inf")) == (0, 1, 1)


def test_no_request_that_finds_an_engine_is_a_wake() -> None:
    wakes = Wakes()
    wakes.sent(1.0, has_waited=True)
    assert num_within(wakes, "+Inf") == 0


def test_nothing_is_counted_where_all_that_waited_have_left() -> None:
    wakes = Wakes()
    wakes.asked_for(0.0, 60.0)
    wakes.sent(3600.0, has_waited=False)
    wakes.sent(3601.0, has_waited=True)
    assert num_within(wakes, "+Inf") == 0


@pytest.mark.parametrize(("again_at", "seconds"), [(180.0, 210.0), (180.1, 30.0)])
def test_a_wake_goes_on_while_those_who_waited_too_long_come_again(again_at: float, seconds: float) -> None:
    wakes = Wakes()
    wakes.asked_for(0.0, 60.0)
    wakes.asked_for(again_at, 60.0)
    wakes.sent(again_at + 30.0, has_waited=True)
    assert wakes.sum_seconds == pytest.approx(seconds)


def test_a_wake_of_many_retries_is_one() -> None:
    wakes = Wakes()
    for now in range(0, 300, 65):
        wakes.asked_for(now, 60.0)
    wakes.sent(300.0, has_waited=True)
    assert wakes.sum_seconds == 300.0


@pytest.mark.parametrize(("seconds", "within"), [(1.0, 1), (1.001, 0), (0.0, 1)])
def test_a_bound_is_in_its_bucket(seconds: float, within: int) -> None:
    wakes = Wakes()
    wakes.asked_for(0.0, 60.0)
    wakes.sent(seconds, has_waited=True)
    assert num_within(wakes, "1.0") == within


def test_longer_than_the_last_bound_counts_in_all() -> None:
    wakes = Wakes()
    wakes.asked_for(0.0, 60.0)
    wakes.sent(BUCKETS_SECONDS[-1] + 1.0, has_waited=True)
    assert [number for _, number in wakes.buckets()] == [0.0] * len(BUCKETS_SECONDS) + [1.0]
