import pytest

from kvasir_router.service.in_flight_limits import ErrorShare


def test_answers_and_errors_are_counted() -> None:
    share = ErrorShare()
    for number in range(10):
        share.count(is_error=number < 3, now=5.0)
    assert (share.answers.at(5.0), share.errors.at(5.0)) == pytest.approx((10.0, 3.0))


def test_old_ones_fade() -> None:
    share = ErrorShare()
    share.count(is_error=True, now=0.0)
    share.count(is_error=False, now=60.0)
    assert share.errors.at(60.0) == pytest.approx(0.05, abs=0.01)
    assert share.answers.at(60.0) == pytest.approx(1.05, abs=0.01)
