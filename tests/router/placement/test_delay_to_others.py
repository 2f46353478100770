import pytest
from tests.router.parts import a_request, an_endpoint

from kvasir_router.placement.costs import DELAY_PER_QUEUE_SECOND, DERIVED_TERMS, MOST_DELAY, TERMS, columns_of
from kvasir_router.service.prefill_rate import work
from kvasir_router.service.registry import Endpoint

OWN = work(1000) / 1000


def seconds(endpoints: list[Endpoint], cached: dict[str, int]) -> list[float]:
    """Of a prompt of 1,000 tokens."""
    return columns_of(TERMS, DERIVED_TERMS, a_request(1000), endpoints, cached, 0.0)["delay_to_others"]


def test_nothing_while_one_endpoint_is_idle() -> None:
    endpoints = [an_endpoint("a", prefill_tokens=5000), an_endpoint("b")]
    assert seconds(endpoints, {}) == [0.0, 0.0]


def test_own_prefill_weighs_with_the_shortest_queue() -> None:
    endpoints = [an_endpoint("a", prefill_tokens=5000), an_endpoint("b", prefill_tokens=500)]
    weight = DELAY_PER_QUEUE_SECOND * work(500) / 1000
    expected = [0.0, weight * (OWN - work(100, 900) / 1000)]
    assert seconds(endpoints, {"a": 900}) == pytest.approx(expected)


def test_it_has_a_bound() -> None:
    for num_tokens in (30_000, 60_000):
        endpoints = [an_endpoint(url, prefill_tokens=num_tokens) for url in ("a", "b")]
        found = seconds(endpoints, {"a": 900})
        assert found == pytest.approx([0.0, MOST_DELAY * (OWN - work(100, 900) / 1000)])
