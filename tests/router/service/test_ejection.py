import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_router.service.in_flight_limits import CircuitState, Ejection


def fleet(num_endpoints: int) -> Ejection:
    ejection = Ejection()
    ejection.follow({str(number) for number in range(num_endpoints)})
    return ejection


def fail(ejection: Ejection, url: str, count: int, now: float = 100.0) -> list[bool]:
    return [ejection.failed(url, now) for _ in range(count)]


def test_five_errors_in_a_row_eject_and_four_do_not() -> None:
    ejection = fleet(2)
    assert fail(ejection, "0", 4) == [False] * 4
    assert ejection.max_in_flight("0") is None
    assert ejection.failed("0", 100.0)
    assert (ejection.max_in_flight("0"), ejection.max_in_flight("1")) == (0, None)


def test_an_answer_between_errors_makes_no_row_of_them() -> None:
    ejection = fleet(2)
    fail(ejection, "0", 4)
    ejection.succeeded("0", 100.0)
    fail(ejection, "0", 4)
    assert ejection.state("0") is CircuitState.CLOSED


def answers(ejection: Ejection, url: str, pattern: str) -> None:
    """`x` is an error, `.` none."""
    for sign in pattern:
        (ejection.failed if sign == "x" else ejection.succeeded)(url, 100.0)


def test_an_endpoint_that_fails_clearly_more_often_than_the_others_is_out() -> None:
    ejection = fleet(3)
    for url in "12":
        answers(ejection, url, "." * 20)
    answers(ejection, "0", ".x" * 6)
    assert ejection.state("0") is CircuitState.OPEN


@pytest.mark.parametrize(
    ("pattern", "of_others"), [(".x" * 6, "." * 13 + "x" * 3), ("..x" * 6, "." * 20), (".x" * 4, "." * 20)]
)
def test_few_answers_or_few_errors_or_errors_everywhere_make_no_outlier(pattern: str, of_others: str) -> None:
    ejection = fleet(3)
    for url in "12":
        answers(ejection, url, of_others)
    answers(ejection, "0", pattern)
    assert ejection.state("0") is CircuitState.CLOSED


@pytest.mark.parametrize(("num_endpoints", "num_ejected"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_never_more_than_half_is_out(num_endpoints: int, num_ejected: int) -> None:
    ejection = fleet(num_endpoints)
    for number in range(num_endpoints):
        fail(ejection, str(number), 10)
    out = [number for number in range(num_endpoints) if ejection.max_in_flight(str(number)) is not None]
    assert len(out) == num_ejected


def test_an_ejection_ends_with_trials() -> None:
    ejection = fleet(2)
    fail(ejection, "0", 5)
    assert not ejection.advance(104.9)
    assert ejection.advance(105.0)
    assert ejection.max_in_flight("0") == 1
    assert [ejection.succeeded("0", 105.0), ejection.succeeded("0", 105.0)] == [False, True]
    assert ejection.max_in_flight("0") is None


def test_a_failed_trial_ejects_again() -> None:
    ejection = fleet(2)
    fail(ejection, "0", 5)
    ejection.advance(105.0)
    assert ejection.failed("0", 105.0)
    assert ejection.max_in_flight("0") == 0


def test_all_ejections_that_are_over_end_together() -> None:
    ejection = fleet(4)
    for url in "01":
        fail(ejection, url, 5)
    ejection.advance(105.0)
    assert [ejection.max_in_flight(url) for url in "0123"] == [1, 1, None, None]


def test_an_endpoint_whose_last_answer_was_an_error_is_a_suspect_for_longer_each_time() -> None:
    ejection = fleet(2)
    ejection.failed("0", 100.0)
    assert ejection.suspect_until("0") == 101.0
    ejection.failed("0", 101.0)
    assert ejection.suspect_until("0") == 103.0


def test_an_answer_clears_a_suspect() -> None:
    ejection = fleet(2)
    ejection.failed("0", 100.0)
    ejection.succeeded("0", 100.1)
    assert ejection.suspect_until("0") <= 100.1


def test_one_that_fails_fast_is_asked_rarely() -> None:
    """Whoever is not suspected always takes the endpoint that answers at once, because it looks idle."""
    ejection, num_asked = fleet(1), 0
    for tenth in range(600):
        if ejection.suspect_until("0") <= tenth / 10:
            ejection.failed("0", tenth / 10)
            num_asked += 1
    assert num_asked <= 8


def test_an_endpoint_that_comes_back_starts_afresh() -> None:
    ejection = fleet(4)
    for url in "01":
        fail(ejection, url, 5)
    ejection.follow({"1", "2", "3"})
    ejection.follow({"0", "1", "2", "3"})
    assert [ejection.max_in_flight(url) for url in "01"] == [None, 0]


def test_the_longest_out_come_back_where_others_have_gone() -> None:
    ejection = fleet(4)
    fail(ejection, "0", 5, now=100.0)
    fail(ejection, "1", 5, now=101.0)
    ejection.follow({"0", "1", "2"})
    assert [ejection.max_in_flight(url) for url in "01"] == [None, 0]
    ejection.follow({"1"})
    assert ejection.max_in_flight("1") is None


def test_errors_from_before_an_ejection_are_not_counted_after_it() -> None:
    ejection = fleet(2)
    answers(ejection, "0", "x" * 12)
    ejection.advance(200.0)
    for _ in range(2):
        ejection.succeeded("0", 105.0)
    assert not ejection.failed("0", 105.0)
    assert ejection.max_in_flight("0") is None


def test_answers_of_unknown_endpoints_count_nowhere() -> None:
    ejection = fleet(2)
    assert fail(ejection, "gone", 10) == [False] * 10
    assert not ejection.succeeded("gone", 100.0)
    assert (ejection.max_in_flight("gone"), ejection.suspect_until("gone")) == (None, 0.0)


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from(["failed", "failed", "succeeded", "advance", "gone"]), st.floats(0, 20)
        )
    ),
)
def test_whatever_happens_half_of_the_fleet_takes_requests(
    num_endpoints: int, events: list[tuple[int, str, float]]
) -> None:
    ejection, now = fleet(num_endpoints), 0.0
    for number, event, seconds in events:
        now += seconds
        if event == "advance":
            ejection.advance(now)
        elif event == "gone":
            num_endpoints = max(num_endpoints - 1, 1)
            ejection.follow({str(one) for one in range(num_endpoints)})
        else:
            getattr(ejection, event)(str(number), now)
        num_limited = sum(ejection.max_in_flight(str(one)) is not None for one in range(num_endpoints))
        assert 2 * num_limited <= num_endpoints
