"""A forecast follows a clear trend, what recurs and a known time of day, and says nothing else."""

import pytest

from kvasir_operator.autoscaling.forecast import History, PastNeed, forecast

NONE = History()


def past(*needs: float, step: float = 30.0) -> list[PastNeed]:
    """The last one is of now, which is 0."""
    return [PastNeed(-step * (len(needs) - 1 - index), each) for index, each in enumerate(needs)]


def test_a_ramp_goes_on():
    assert forecast(past(2, 3, 4, 5, 6), NONE, 0, 60) == pytest.approx(8)


def test_a_trend_alone_promises_at_most_half_as_much_again():
    assert forecast(past(2, 3, 4, 5, 6), NONE, 0, 600) == 9


def test_two_minutes_must_be_seen():
    assert forecast(past(2, 3, 4, 5, 6, step=29), NONE, 0, 60) == 0
    assert forecast(past(2, 6, step=130), NONE, 0, 60) == 0


def test_what_wavers_has_no_trend():
    assert forecast(past(2, 6, 3, 7, 4), NONE, 0, 60) == 0


def test_what_stays_equal_has_no_trend():
    assert forecast(past(3, 3, 3, 3, 3), NONE, 0, 60) == 0


def test_only_the_last_ten_minutes_count():
    assert forecast([PastNeed(-600, 100), *past(2, 3, 4, 5, 6)], NONE, 0, 60) == pytest.approx(8)
    assert forecast([PastNeed(-599, 100), *past(2, 3, 4, 5, 6)], NONE, 0, 60) == 0


@pytest.mark.parametrize(("days", "expected"), [((9.0,), 0), ((9.0, 5.0), 7), ((9.0, 5.0, 100.0), 9)])
def test_the_time_of_day_counts_from_two_days_on_by_their_median(days, expected):
    assert forecast([], NONE, 0, 60, days) == expected


def test_a_jump_is_no_trend() -> None:
    assert forecast(past(2, 2, 2, 2, 2, 6, 6, 6, 6, 6), NONE, 0, 60) == 6


def test_growth_that_slows_down_goes_on_as_slowly() -> None:
    assert forecast(past(2, 4, 6, 7, 8), NONE, 0, 60) < forecast(past(2, 3.5, 5, 6.5, 8), NONE, 0, 60)


def test_what_recurs_is_needed_again() -> None:
    bins = (5.0, *[1.0] * 14, 5.0, *[1.0] * 12)  # every 15 minutes; the last is minute 27
    assert forecast([], History(0, bins, period=15), 0, 120) == 5.0
    assert forecast([], History(0, bins, period=15), 0, 60) == 0.0
