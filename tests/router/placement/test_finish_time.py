from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from tests.router.parts import a_request, an_endpoint, chatting

from kvasir_router.placement.costs import TERMS, Term
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.request import InferenceRequest
from kvasir_router.service.prefill_rate import work
from kvasir_router.service.registry import Endpoint


def placed(num_tokens: int, *endpoints: Endpoint, cached: dict[str, int] | None = None, now: float = 0.0) -> str:
    return FinishTime().place(a_request(num_tokens), endpoints, cached or {}, now).leg.endpoint.url


@pytest.mark.parametrize(
    ("why", "one", "other", "cached", "expected"),
    [
        ("shorter queue", {"prefill_tokens": 500}, {"prefill_tokens": 400}, {}, "b"),
        ("queue counts tokens, not requests", {"num_in_flight": 9}, {"prefill_tokens": 400}, {}, "a"),
        ("faster prefill", {}, {"prefill_rate": 1500.0}, {}, "b"),
        ("long queue on a fast one", {"prefill_rate": 4000.0, "prefill_tokens": 9000}, {}, {}, "b"),
        ("cached prefix", {}, {}, {"b": 800}, "b"),
        ("cached prefix is worth a short queue", {}, {"prefill_tokens": 500}, {"b": 800}, "b"),
        ("but not a long one", {}, {"prefill_tokens": 1500}, {"b": 800}, "a"),
        ("longer prefix of two holders", {}, {}, {"a": 300, "b": 600}, "b"),
        ("fewer tokens in decode", {"resident_tokens": 9000}, {"resident_tokens": 2000}, {}, "b"),
        ("KV nearly full", {"kv_usage": 0.99, "kv_capacity_tokens": 10**6}, {}, {}, "b"),
        ("KV usage without capacity", {"kv_usage": 0.99}, {}, {}, "b"),
        ("own requests fill the KV", {"resident_tokens": 9900, "kv_capacity_tokens": 10**4}, {}, {}, "b"),
        (
            "the request's own KV need, where that is more of the cache",
            {"kv_usage": 0.5, "kv_capacity_tokens": 2000},
            {"kv_usage": 0.5, "kv_capacity_tokens": 10**6},
            {},
            "b",
        ),
        ("full KV outweighs a cached prefix", {"kv_usage": 1.0}, {}, {"a": 1000}, "b"),
        ("full KV loses to a queue only while it is short", {"kv_usage": 1.0}, {"prefill_tokens": 60_000}, {}, "a"),
    ],
)
def test_finish_time_prefers(
    why: str, one: dict[str, Any], other: dict[str, Any], cached: dict[str, int], expected: str
) -> None:
    assert placed(1000, an_endpoint("a", **one), an_endpoint("b", **other), cached=cached) == expected, why


def test_the_cost_is_in_seconds_and_the_placements() -> None:
    busy, request = an_endpoint("a", prefill_tokens=2000), a_request(1000)
    placement = FinishTime().place(request, [busy], {"a": 600}, now=0.0)
    queue, own, decode = work(2000) / 1000, work(400, 600) / 1000, 0.05 * 2000 / 1000
    assert placement.cost_seconds == pytest.approx(queue + own + decode)
    assert (placement.leg.cached_tokens, placement.leg.uncached_tokens) == (600, 400)


def test_a_queue_gets_shorter_while_the_engine_works_on_it() -> None:
    busy = an_endpoint("a", prefill_tokens=2000)
    busy.load.resident_tokens = 0
    assert placed(1000, busy, an_endpoint("b", prefill_tokens=1000), now=0.0) == "b"
    assert placed(1000, busy, an_endpoint("b", prefill_rate=550.0), now=1.5) == "a"


def test_terms_add_up_and_are_shown_for_each_endpoint() -> None:
    policy = FinishTime({"one": lambda *_: [1.0, 2.0], "two": lambda *_: [3.0, 0.5]}, {})
    endpoints = [an_endpoint("a"), an_endpoint("b")]
    placement = policy.place(a_request(), endpoints, {}, now=0.0)
    assert (placement.leg.endpoint.url, placement.cost_seconds) == ("b", 2.5)
    assert policy.costs(a_request(), endpoints, {}, now=0.0) == {
        "a": {"one": 1.0, "two": 3.0},
        "b": {"one": 2.0, "two": 0.5},
    }


def test_more_cached_than_asked_costs_nothing_negative() -> None:
    placement = FinishTime().place(a_request(10), [an_endpoint("a")], {"a": 64}, now=0.0)
    assert (placement.leg.cached_tokens, placement.leg.uncached_tokens) == (10, 0)
    assert placement.cost_seconds is not None
    assert placement.cost_seconds > 0


def test_equal_costs_go_to_the_one_idle_longest() -> None:
    endpoints = (an_endpoint(url, last_dispatch=number) for url, number in (("a", 7), ("b", 5), ("c", 9)))
    assert placed(100, *endpoints) == "b"


def test_noise_in_measured_rates_does_not_pin_requests_to_one() -> None:
    endpoints = an_endpoint("a", prefill_rate=1010.0, last_dispatch=2), an_endpoint("b", last_dispatch=1)
    assert placed(1000, *endpoints) == "b"


def test_thirty_chats_on_one_system_prompt_pay_no_barrier() -> None:
    """The prompt of 4k tokens is in the cache once; each chat adds a question and an answer."""
    holder = an_endpoint("a", kv_capacity_tokens=100_000, kv_usage=0.04)
    other = an_endpoint("b", kv_capacity_tokens=100_000, kv_usage=0.0)
    for number in range(30):
        chatting(holder, str(number), cached=4096, uncached=64)
    costs = FinishTime().costs(a_request(4160), [holder, other], {"a": 4096}, now=0.0)
    assert (costs["a"]["kv_barrier"], costs["b"]["kv_barrier"]) == (0.0, 0.0)


class Counted(list[Endpoint]):
    """Endpoints, and how often somebody has gone through all of them."""

    num_passes = 0

    def __iter__(self) -> Iterator[Endpoint]:
        self.num_passes += 1
        return super().__iter__()


class CountedTerm:
    def __init__(self, term: Term) -> None:
        self.num_asked = 0
        self._term = term

    def __call__(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
    ) -> list[float]:
        self.num_asked += 1
        return self._term(request, endpoints, cached, now)


def test_a_pick_asks_each_term_once_and_goes_through_all_endpoints_a_fixed_number_of_times() -> None:
    """Work is counted, not time: what every request pays for."""
    terms = {name: CountedTerm(term) for name, term in TERMS.items()}
    passes = []
    for num_endpoints in (2, 64):
        endpoints = Counted(an_endpoint(str(number)) for number in range(num_endpoints))
        FinishTime(terms).place(a_request(100), endpoints, {"0": 50}, 0.0)
        passes.append(endpoints.num_passes)
    assert passes[0] == passes[1] <= 5
    assert [term.num_asked for term in terms.values()] == [2] * len(TERMS)
