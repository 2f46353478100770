import pytest

from kvasir_router.admission.admission import DrainRate


def drained(tokens_each: int, every_seconds: float, count: int) -> tuple[DrainRate, float]:
    rate, now = DrainRate(), 100.0
    rate.began(now)
    for _ in range(count):
        now += every_seconds
        rate.started(tokens_each, now)
    return rate, now


def test_nothing_is_known_before_something_has_waited() -> None:
    rate = DrainRate()
    assert (rate.tokens_per_second(0.0), rate.seconds_for(10, 0.0)) == (None, None)


@pytest.mark.parametrize("count", [1, 5, 500])
def test_a_steady_drain_is_found_from_the_first_start(count: int) -> None:
    rate, now = drained(100, 0.5, count)
    assert rate.tokens_per_second(now) == pytest.approx(200.0)
    assert rate.seconds_for(1000, now) == pytest.approx(5.0)


def test_the_time_in_which_nothing_waits_does_not_count() -> None:
    rate, now = drained(100, 0.5, 20)
    rate.ended(now)
    rate.began(now + 3600)
    assert rate.tokens_per_second(now + 3600) == pytest.approx(200.0)


def test_began_again_while_something_waits_changes_nothing() -> None:
    rate = DrainRate()
    rate.began(0.0)
    rate.began(5.0)
    rate.started(100, 10.0)
    assert rate.tokens_per_second(10.0) == pytest.approx(10.0)


def test_the_rate_falls_while_nothing_starts() -> None:
    rate, now = drained(100, 0.5, 100)
    seen = [rate.tokens_per_second(now + seconds) for seconds in (0, 10, 60)]
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == pytest.approx(0.0, abs=20)


def test_a_change_is_believed_within_a_minute() -> None:
    rate, now = drained(100, 0.5, 100)
    for _ in range(60):
        now += 1.0
        rate.started(10, now)
    assert rate.tokens_per_second(now) == pytest.approx(10.0, abs=30)


def test_nothing_that_drains_gives_no_time() -> None:
    rate = DrainRate()
    rate.began(0.0)
    assert rate.seconds_for(10, 5.0) is None
