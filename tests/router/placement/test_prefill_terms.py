import pytest
from tests.router.parts import a_request, an_endpoint

from kvasir_router.placement.costs import decode_load, own_prefill, prefill_queue
from kvasir_router.service.load import InFlight
from kvasir_router.service.prefill_rate import CONTEXT_DOUBLING_TOKENS, work


def test_the_queue_shrinks_with_time_but_not_below_what_has_not_begun() -> None:
    endpoint = an_endpoint("a", prefill_tokens=1000)
    endpoint.load.begin(InFlight("next", 0, 500, 0), 0.0)
    rest = work(500) / 1000
    whole = work(1000) / 1000 + rest
    for now, left in ((0.0, whole), (0.4, whole - 0.4), (9.0, rest)):
        assert prefill_queue(a_request(), [endpoint], {}, now) == [pytest.approx(left)]


def test_own_prefill_is_what_is_not_cached_at_the_rate_there() -> None:
    endpoints = [an_endpoint("a"), an_endpoint("b"), an_endpoint("c", prefill_rate=2000.0)]
    seconds = own_prefill(a_request(1000), endpoints, {"b": 600}, 0.0)
    assert seconds == [pytest.approx(s) for s in (work(1000) / 1000, work(400, 600) / 1000, work(1000) / 2000)]


def test_tokens_behind_a_long_context_cost_more() -> None:
    """A cached prefix saves its own work, not the attention of what follows it."""
    (seconds,) = own_prefill(a_request(33_768), [an_endpoint("a")], {"a": 32_768}, 0.0)
    assert seconds == pytest.approx(1000 * (1 + 33_268 / CONTEXT_DOUBLING_TOKENS) / 1000)


@pytest.mark.parametrize("cached", [99, 100, 101, 5000])
def test_the_last_token_is_always_computed(cached: int) -> None:
    (seconds,) = own_prefill(a_request(100), [an_endpoint("a")], {"a": cached}, 0.0)
    assert seconds == pytest.approx(work(1, 99) / 1000)


def test_decodes_weigh_by_the_tokens_that_they_read() -> None:
    endpoints = [an_endpoint("a", resident_tokens=2000), an_endpoint("b", resident_tokens=2000, prefill_rate=500.0)]
    assert decode_load(a_request(), endpoints, {}, 0.0) == [pytest.approx(0.1), pytest.approx(0.2)]
