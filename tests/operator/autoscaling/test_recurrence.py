"""What has come twice at the same distance is waited for a third time, and nothing else is."""

import pytest

from kvasir_operator.autoscaling.forecast import (
    BIN_SECONDS,
    LEAST_COMPARED_BINS,
    MOST_BINS,
    SEEN_AFTER_SECONDS,
    History,
    noted,
    recurring,
)

QUIET, BUSY = 1.0, 5.0


def ahead(bins: int) -> float:
    """Seconds with which so many bins are looked at."""
    return bins * BIN_SECONDS - SEEN_AFTER_SECONDS


def expected(bins: list[float], num_ahead: int) -> float:
    """What is expected after minutes of these needs, so many minutes ahead."""
    history = History()
    for minute, replicas in enumerate(bins):
        history = noted(history, BIN_SECONDS * minute, replicas, ahead(num_ahead))
    return recurring(history, ahead(num_ahead))


def bursts(length: int, *begins: int, busy: int = 2) -> list[float]:
    """Minutes of which `busy` from each of `begins` on are busy."""
    return [BUSY if any(begin <= each < begin + busy for begin in begins) else QUIET for each in range(length)]


@pytest.mark.parametrize(("length", "replicas"), [(27, 0.0), (28, BUSY), (29, BUSY)])
def test_a_burst_of_every_quarter_of_an_hour_is_known_before_its_third_time(length: int, replicas: float) -> None:
    # With 28 minutes known the last is minute 27, and three ahead is minute 30.
    assert expected(bursts(length, 0, 15), 3) == replicas


def test_the_period_is_the_first_after_which_load_came_back_and_not_two_of_them() -> None:
    """Bursts that are the same but every other time are more alike after two periods than after one."""
    bins = [
        bin + other for bin, other in zip(bursts(45, 0, 10, 20, 30, 40), bursts(45, 0, 20, 40, busy=1), strict=True)
    ]
    history = History()
    for minute, replicas in enumerate(bins):
        history = noted(history, BIN_SECONDS * minute, replicas, ahead(3))
    assert history.period == 10


def test_it_is_not_waited_for_longer_than_it_stays() -> None:
    assert expected(bursts(32, 0, 15, 30), 1) == QUIET


def test_the_lower_of_the_two_former_times_counts() -> None:
    assert expected([3.0, 3.0, *bursts(28, 0, 15)[2:]], 3) == 3.0


def test_one_burst_says_nothing() -> None:
    assert expected(bursts(40, 15), 3) == 0.0


def test_what_slopes_does_not_recur() -> None:
    ramp = [float(minute) for minute in range(1, 31)]
    assert expected([*ramp, *reversed(ramp)], 3) == 0.0


def test_what_is_constant_does_not_recur() -> None:
    assert expected([QUIET] * 40, 3) == 0.0


def test_a_period_must_be_compared_over_ten_minutes() -> None:
    assert expected(bursts(LEAST_COMPARED_BINS + 6, 0, 7, 14, busy=1), 5) == 0.0
    assert expected(bursts(LEAST_COMPARED_BINS + 7, 0, 7, 14, busy=1), 5) == BUSY


def test_a_period_is_looked_back_by_from_no_further_ahead_than_itself() -> None:
    history = History(0.0, tuple(bursts(28, 0, 7, 14, 21, busy=1)), period=7)
    assert recurring(history, ahead(20)) == BUSY


def test_a_minute_holds_the_most_that_was_needed_in_it() -> None:
    history = History()
    for at, replicas in ((100, 1.0), (115, 3.0), (159, 2.0), (160, 1.5)):
        history = noted(history, at, replicas, 60)
    assert history == History(160.0, (3.0, 1.5))


def test_minutes_without_measurement_are_as_the_one_before() -> None:
    history = noted(noted(History(), 0, 2.0, 60), 185, 1.0, 60)
    assert history == History(180.0, (2.0, 2.0, 2.0, 1.0))


def test_two_hours_are_kept_and_begin_anew_after_a_gap_as_long() -> None:
    history = History()
    for minute in range(MOST_BINS + 5):
        history = noted(history, 60.0 * minute, float(minute), 60)
    assert (len(history.bins), history.bins[0]) == (MOST_BINS, 5.0)
    assert len(noted(history, history.begun_at + 60.0 * MOST_BINS, 1.0, 60).bins) == MOST_BINS
    assert noted(history, history.begun_at + 60.0 * MOST_BINS + 1, 1.0, 60).bins == (1.0,)
