"""A wake lasts from the first request that finds no engine to the first that is sent to one."""

import pytest

from kvasir_router.service.wakes import BUCKETS_SECONDS, Wakes


def num_within(wakes: Wakes, bound: str) -> float:
    return dict(wakes.buckets())[bound]


def test_the_first_request_that_waits_counts_and_a_wake_is_counted_once() -> None:
    wakes = Wakes()
    wakes.asked_for(100.0, is_first=True)
    wakes.asked_for(115.0, is_first=False)
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
    wakes.asked_for(0.0, is_first=True)
    wakes.sent(3600.0, has_waited=False)
    wakes.sent(3601.0, has_waited=True)
    assert num_within(wakes, "+Inf") == 0


def test_who_finds_an_empty_queue_again_begins_another_wake() -> None:
    wakes = Wakes()
    wakes.asked_for(0.0, is_first=True)
    wakes.asked_for(3600.0, is_first=True)
    wakes.sent(3630.0, has_waited=True)
    assert wakes.sum_seconds == 30.0


@pytest.mark.parametrize(("seconds", "within"), [(1.0, 1), (1.001, 0), (0.0, 1)])
def test_a_bound_is_in_its_bucket(seconds: float, within: int) -> None:
    wakes = Wakes()
    wakes.asked_for(0.0, is_first=True)
    wakes.sent(seconds, has_waited=True)
    assert num_within(wakes, "1.0") == within


def test_longer_than_the_last_bound_counts_in_all() -> None:
    wakes = Wakes()
    wakes.asked_for(0.0, is_first=True)
    wakes.sent(BUCKETS_SECONDS[-1] + 1.0, has_waited=True)
    assert [number for _, number in wakes.buckets()] == [0.0] * len(BUCKETS_SECONDS) + [1.0]
