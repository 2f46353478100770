"""Each revision with a weight gets its share of the requests, to within about one, and no luck is needed for it."""

from collections import Counter
from collections.abc import Iterator

import pytest
from tests.router.parts import a_request, an_endpoint

from kvasir_router.picker import Picker, TrafficSplit
from kvasir_router.placement.policies import RoundRobin
from kvasir_router.service.registry import Endpoint


def view(revision: str, weight: float | None = None, url: str = "") -> Endpoint:
    return an_endpoint(url or revision, revision=revision, traffic_weight=weight)


def turns(split: TrafficSplit, *endpoints: Endpoint) -> Iterator[str]:
    while True:
        yield "+".join(endpoint.url for endpoint in split.choose(endpoints))


def counts(number: int, *endpoints: Endpoint, split: TrafficSplit | None = None) -> dict[str, int]:
    return Counter(turn for turn, _ in zip(turns(split or TrafficSplit(), *endpoints), range(number), strict=False))


@pytest.mark.parametrize("weight", [1.0, 10.0, 33.0, 50.0, 90.0, 99.5])
def test_at_every_moment_a_canary_has_had_its_share(weight: float) -> None:
    canary, stable = view("new", weight), view("old")
    num_canary = 0
    for number, turn in zip(range(1, 1001), turns(TrafficSplit(), stable, canary), strict=False):
        num_canary += turn == "new"
        assert abs(num_canary - number * weight / 100) <= 1


def test_two_canaries_and_the_rest_get_theirs() -> None:
    assert counts(100, view("a", 10.0), view("b", 30.0), view("c")) == {"a": 10, "b": 30, "c": 60}


def test_revisions_without_a_weight_share_the_rest_as_the_policy_says() -> None:
    assert counts(10, view("a", 10.0), view("b"), view("c")) == {"a": 1, "b+c": 9}


def test_without_any_weight_all_are_left_to_the_policy() -> None:
    assert counts(10, view("a"), view("b")) == {"a+b": 10}


def test_all_pods_of_a_canary_are_left_to_the_policy() -> None:
    assert counts(10, view("new", 50.0, "n1"), view("new", 50.0, "n2"), view("old")) == {"n1+n2": 5, "old": 5}


def test_a_revision_without_a_ready_endpoint_gives_its_share_to_the_others() -> None:
    assert counts(10, view("b", 30.0), view("c", 20.0)) == {"b": 6, "c": 4}
    assert counts(10, view("old")) == {"old": 10}
    assert counts(10, view("new", 10.0)) == {"new": 10}


def test_weights_above_a_hundred_in_all_leave_the_rest_nothing() -> None:
    assert counts(12, view("a", 100.0), view("b", 50.0), view("c")) == {"a": 8, "b": 4}


def test_a_weight_of_zero_gets_nothing_while_others_are_ready() -> None:
    split = TrafficSplit()
    assert counts(7, view("new", 90.0), view("old"), split=split)["old"] == 1
    assert counts(50, view("new", 0.0), view("old"), split=split) == {"old": 50}
    assert counts(5, view("new", 0.0), split=split) == {"new": 5}


def test_a_revision_that_was_away_is_not_owed_what_it_missed() -> None:
    split = TrafficSplit()
    counts(1000, view("old"), split=split)
    assert counts(10, view("new", 10.0), view("old"), split=split) == {"new": 1, "old": 9}


def test_while_its_slices_change_one_after_the_other_a_revision_stays_one() -> None:
    assert counts(10, view("new", 10.0, "n1"), view("new", None, "n2"), view("old")) == {"n1+n2": 1, "old": 9}


def picks(number: int, *endpoints: Endpoint, avoid: frozenset[str] = frozenset()) -> dict[str, int]:
    picker = Picker(RoundRobin())
    found = (picker.pick(a_request(10), endpoints, {}, 0.0, avoid) for _ in range(number))
    return Counter(placement.leg.endpoint.url for placement in found if placement is not None)


def test_the_share_is_kept_before_the_policy_picks() -> None:
    assert picks(10, view("new", 10.0), view("old")) == {"new": 1, "old": 9}


def test_a_request_that_has_failed_may_go_anywhere() -> None:
    endpoints = (view("new", 0.0), view("old", None, "o1"))
    assert picks(3, *endpoints, avoid=frozenset({"o1"})) == {"new": 3}
    three = (view("a", 0.0), view("b", None, "o1"), view("c", None, "o2"))
    assert picks(3, *three, avoid=frozenset({"o1"})) == {"a": 3}
