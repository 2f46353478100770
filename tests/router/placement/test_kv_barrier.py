import pytest
from tests.router.parts import a_request, an_endpoint, chatting

from kvasir_router.placement.costs import KV_BARRIER_START, barrier_seconds, kv_barrier
from kvasir_router.service.registry import Endpoint

CAPACITY = 10_000


def barrier(endpoint: Endpoint, num_tokens: int, cached: int = 0) -> float:
    return kv_barrier(a_request(num_tokens), [endpoint], {endpoint.url: cached}, 0.0)[0]


def test_it_rises_without_a_jump() -> None:
    values = [barrier_seconds(usage / 100) for usage in range(70, 111)]
    assert values[:11] == [0.0] * 11
    assert values == sorted(values)
    assert values[20] == pytest.approx(0.5)


def test_it_starts_where_uncached_tokens_and_output_pass_the_start() -> None:
    endpoint = an_endpoint("a", kv_capacity_tokens=CAPACITY)
    fitting = int(KV_BARRIER_START * CAPACITY) - 256
    assert barrier(endpoint, fitting) == 0.0
    assert barrier(endpoint, fitting + 1) > 0.0


def test_what_the_request_finds_cached_it_does_not_add() -> None:
    endpoint = an_endpoint("a", kv_capacity_tokens=CAPACITY)
    assert barrier(endpoint, 9_000, cached=2_000) == 0.0
    assert barrier(endpoint, 9_000, cached=1_200) > 0.0


def test_requests_in_flight_count_what_they_have_added() -> None:
    endpoint = an_endpoint("a", kv_capacity_tokens=CAPACITY)
    chatting(endpoint, "x", cached=7_000, uncached=7_000, num_output_tokens=500)
    assert barrier(endpoint, 200) == 0.0
    assert barrier(endpoint, 300) > 0.0


def test_the_engines_own_figure_counts_where_it_is_higher() -> None:
    endpoint = an_endpoint("a", kv_capacity_tokens=CAPACITY, kv_usage=0.78)
    assert barrier(endpoint, 100) == pytest.approx(barrier_seconds(0.78 + 0.0356))


def test_without_a_capacity_the_engines_figure_is_all() -> None:
    assert barrier(an_endpoint("a", kv_usage=0.9), 10**6) == pytest.approx(barrier_seconds(0.9))
    assert barrier(an_endpoint("a"), 10**6) == 0.0
