import pytest

from kvasir_router.service.service import RetryBudget


def test_one_engine_that_dies_with_all_its_requests_fits_in_the_floor() -> None:
    budget = RetryBudget()
    assert [budget.take(5.0) for _ in range(101)] == [True] * 100 + [False]


def test_beyond_the_floor_a_fifth_of_the_requests_may_be_repeated() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.count_request(5.0)
    assert sum(budget.take(5.0) for _ in range(2000)) == 300


def test_a_fleet_that_fails_is_asked_little_more_often_than_one_that_answers() -> None:
    budget, num_retries = RetryBudget(), 0
    for number in range(60_000):  # 1,000 a second, each of which fails
        budget.count_request(number / 1000)
        num_retries += budget.take(number / 1000)
    assert num_retries <= 0.23 * 60_000


def test_what_was_spent_comes_back_with_time() -> None:
    budget = RetryBudget()
    while budget.take(0.0):
        pass
    assert not budget.take(0.05)
    assert budget.take(0.2)
    assert sum(budget.take(60.0) for _ in range(200)) == pytest.approx(99, abs=1)
