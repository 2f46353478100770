from dataclasses import replace

import pytest

from kvasir_router.endpoints.endpoint import EndpointView, Snapshot
from kvasir_router.picker import Picker
from kvasir_router.policies.finish_time import FinishTime, cost_seconds, kv_barrier_seconds
from kvasir_router.policies.round_robin import RoundRobin
from kvasir_router.request import InferenceRequest

A, B, C = (EndpointView(url=url, prefill_rate=1000.0) for url in ("a", "b", "c"))


def prompt(num_tokens: int, model: str | None = "m") -> InferenceRequest:
    return InferenceRequest("/v1/completions", model, True, num_tokens, ())


def picked(policy: FinishTime | RoundRobin, request: InferenceRequest, *endpoints: EndpointView) -> str | None:
    choice = Picker(policy).pick(request, Snapshot(endpoints))
    return None if choice is None else choice.url


@pytest.mark.parametrize(
    ("why", "one", "other", "expected"),
    [
        ("shorter queue", replace(A, prefill_tokens=500), replace(B, prefill_tokens=400), "b"),
        ("queue counts tokens, not requests", replace(A, num_in_flight=9), replace(B, prefill_tokens=400), "a"),
        ("faster prefill", A, replace(B, prefill_rate=1500.0), "b"),
        ("long queue on a fast one", replace(A, prefill_rate=4000.0, prefill_tokens=9000), B, "b"),
        ("cached prefix", A, replace(B, cached_tokens=800), "b"),
        ("cached prefix is worth a short queue", A, replace(B, cached_tokens=800, prefill_tokens=500), "b"),
        ("but not a long one", A, replace(B, cached_tokens=800, prefill_tokens=1500), "a"),
        ("longer prefix of two holders", replace(A, cached_tokens=300), replace(B, cached_tokens=600), "b"),
        ("fewer tokens in decode", replace(A, resident_tokens=9000), replace(B, resident_tokens=2000), "b"),
        ("KV nearly full", replace(A, kv_usage=0.99, kv_capacity_tokens=10**6), B, "b"),
        ("KV usage without capacity", replace(A, kv_usage=0.99), B, "b"),
        ("own requests fill the KV", replace(A, resident_tokens=9900, kv_capacity_tokens=10**4), B, "b"),
        (
            "the request's own KV need, where that is more of the cache",
            replace(A, kv_usage=0.5, kv_capacity_tokens=2000),
            replace(B, kv_usage=0.5, kv_capacity_tokens=10**6),
            "b",
        ),
        ("full KV outweighs a cached prefix", replace(A, kv_usage=1.0, cached_tokens=1000), B, "b"),
        (
            "full KV loses to a queue only while it is short",
            replace(A, kv_usage=1.0),
            replace(B, prefill_tokens=60_000),
            "a",
        ),
    ],
)
def test_finish_time_prefers(why: str, one: EndpointView, other: EndpointView, expected: str) -> None:
    assert picked(FinishTime(), prompt(1000), one, other) == expected, why


def test_finish_time_cost_is_in_seconds() -> None:
    busy = replace(A, prefill_tokens=2000, cached_tokens=600)
    assert cost_seconds(prompt(1000), busy) == pytest.approx(2.4)


def test_more_cached_than_asked_costs_nothing_negative() -> None:
    assert cost_seconds(prompt(10), replace(A, cached_tokens=64)) > 0


def test_equal_costs_go_to_the_one_idle_longest() -> None:
    endpoints = replace(A, last_dispatch=7), replace(B, last_dispatch=5), replace(C, last_dispatch=9)
    assert picked(FinishTime(), prompt(100), *endpoints) == "b"


def test_noise_in_measured_rates_does_not_pin_requests_to_one() -> None:
    endpoints = replace(A, prefill_rate=1010.0, last_dispatch=2), replace(B, last_dispatch=1)
    assert picked(FinishTime(), prompt(1000), *endpoints) == "b"


def test_the_kv_barrier_rises_without_a_jump() -> None:
    values = [kv_barrier_seconds(usage / 100) for usage in range(70, 111)]
    assert values[:11] == [0.0] * 11
    assert values == sorted(values)
    assert values[20] == pytest.approx(0.5)


def test_round_robin_takes_turns() -> None:
    endpoints = {view.url: view for view in (A, B, C)}
    order = []
    for number in range(1, 7):
        choice = Picker(RoundRobin()).pick(prompt(5), Snapshot(tuple(endpoints.values())))
        assert choice is not None
        order.append(choice.url)
        endpoints[choice.url] = replace(choice, last_dispatch=number)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_picks_none_when_no_endpoint_is_usable() -> None:
    assert picked(FinishTime(), prompt(5)) is None


def test_a_full_endpoint_is_no_candidate() -> None:
    assert picked(FinishTime(), prompt(5), replace(A, num_in_flight=2, max_in_flight=2), B) == "b"


def test_only_endpoints_that_serve_the_model_are_candidates() -> None:
    assert picked(FinishTime(), prompt(5), replace(A, models=frozenset({"other"})), B) == "b"


def test_a_request_without_a_model_may_go_anywhere() -> None:
    assert picked(FinishTime(), prompt(5, model=None), replace(A, models=frozenset({"other"}))) == "a"


def test_tried_endpoints_come_last() -> None:
    choice = Picker(FinishTime()).pick(prompt(5), Snapshot((A, replace(B, prefill_tokens=9000)), frozenset({"a"})))
    assert choice is not None
    assert choice.url == "b"


def test_a_tried_endpoint_is_taken_again_when_it_is_the_only_one() -> None:
    choice = Picker(FinishTime()).pick(prompt(5), Snapshot((A,), frozenset({"a"})))
    assert choice is not None
