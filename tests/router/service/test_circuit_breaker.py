import pytest

from kvasir_router.service.in_flight_limits import CircuitBreaker, CircuitState


def tripped(times: int = 1, now: float = 1000.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(times):
        breaker.trip(now)
    return breaker


def half_open() -> CircuitBreaker:
    breaker = tripped()
    assert breaker.advance(1005.0)
    return breaker


def test_a_closed_breaker_limits_nothing_and_is_not_opened_by_a_failure() -> None:
    breaker = CircuitBreaker()
    assert not breaker.failed(0.0)
    assert (breaker.state, breaker.max_in_flight) == (CircuitState.CLOSED, None)


def test_an_open_breaker_lets_nothing_through_until_its_time_is_over() -> None:
    breaker = tripped()
    assert not breaker.advance(1004.9)
    assert (breaker.state, breaker.max_in_flight) == (CircuitState.OPEN, 0)
    assert breaker.advance(1005.0)
    assert not breaker.advance(1005.1)
    assert (breaker.state, breaker.max_in_flight) == (CircuitState.HALF_OPEN, 1)


def test_two_trials_that_succeed_close_it() -> None:
    breaker = half_open()
    assert not breaker.succeeded()
    assert breaker.succeeded()
    assert breaker.state is CircuitState.CLOSED


def test_a_trial_that_fails_opens_it_for_twice_as_long() -> None:
    breaker = half_open()
    breaker.succeeded()
    assert breaker.failed(1010.0)
    assert not breaker.advance(1019.9)
    assert breaker.advance(1020.0)
    assert not breaker.succeeded()  # earlier trials count no more


def test_answers_to_requests_from_before_it_opened_change_nothing() -> None:
    breaker = tripped()
    assert not breaker.succeeded()
    assert not breaker.failed(1001.0)
    assert breaker.advance(1005.0)


@pytest.mark.parametrize(("trips", "seconds"), [(1, 5), (2, 10), (4, 40), (5, 60), (50, 60)])
def test_each_trip_is_twice_as_long_up_to_a_minute(trips: int, seconds: float) -> None:
    breaker = tripped(trips)
    assert not breaker.advance(1000.0 + seconds - 0.1)
    assert breaker.advance(1000.0 + seconds)


@pytest.mark.parametrize(("later", "seconds"), [(100.0, 20), (1000.0, 5)])
def test_trips_are_forgotten_after_a_long_peace(later: float, seconds: float) -> None:
    breaker = tripped(2)
    breaker.trip(1010.0 + later)
    assert not breaker.advance(1010.0 + later + seconds - 0.1)
    assert breaker.advance(1010.0 + later + seconds)
