import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_router.admission.tenant_limits import TokenBucket


def test_a_minutes_tokens_pass_at_once_and_no_more() -> None:
    bucket = TokenBucket(600, 0.0)
    assert bucket.take(600, 0.0) == 0.0
    assert bucket.take(1, 0.0) == pytest.approx(0.1)


def test_it_fills_at_its_rate_and_not_beyond_a_minute() -> None:
    bucket = TokenBucket(600, 0.0)
    bucket.take(600, 0.0)
    assert bucket.take(100, 9.0) == pytest.approx(1.0)
    assert bucket.take(100, 10.0) == 0.0
    assert bucket.take(601, 1000.0) == 0.0
    assert bucket.take(599, 1000.0) > 0


def test_what_is_refused_takes_nothing() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(50, 0.0)
    assert bucket.take(20, 0.0) == pytest.approx(10.0)
    assert bucket.take(10, 0.0) == 0.0


def test_a_request_larger_than_the_bucket_waits_for_a_full_one_and_is_paid_off() -> None:
    bucket = TokenBucket(60, 0.0)
    assert bucket.take(180, 0.0) == 0.0
    assert bucket.take(1, 0.0) == pytest.approx(121.0)


def test_what_is_given_back_can_be_taken_again() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(60, 0.0)
    bucket.give_back(100)
    assert bucket.take(60, 0.0) == 0.0
    assert bucket.take(1, 0.0) > 0


@given(st.integers(1, 10**7), st.lists(st.integers(0, 10**7), max_size=20), st.floats(0, 1e6))
def test_whoever_comes_back_after_the_time_named_is_let_in_and_a_second_earlier_is_not(
    rate: int, taken: list[int], now: float
) -> None:
    bucket = TokenBucket(rate, now)
    for num_tokens in taken:
        seconds = bucket.take(num_tokens, now)
        if seconds:
            wait_seconds = math.ceil(seconds)
            if seconds > 1:
                assert bucket.take(num_tokens, now + math.floor(seconds - 0.001)) > 0
            now += wait_seconds
            assert bucket.take(num_tokens, now) == 0.0
