import pytest
from tests.router.parts import a_request, an_endpoint, chatting

from kvasir_router.placement.costs import MIXED_STALL_WEIGHT, STALL_WEIGHT, decode_stall, stall_of_prefill
from kvasir_router.service.prefill_rate import work


def test_a_prefill_costs_every_request_that_decodes_there_its_time() -> None:
    quiet, busy = an_endpoint("a"), an_endpoint("b")
    for number in range(4):
        chatting(busy, str(number), cached=0, uncached=10)
    before, after = (endpoint.load.num_decoding for endpoint in (quiet, busy))
    assert after - before == 4
    one, other = decode_stall(a_request(1000), [quiet, busy], {}, 0.0)
    assert other - one == pytest.approx(4 * STALL_WEIGHT * work(1000) / 1000)


def test_where_each_prefills_for_itself_the_prefill_that_is_known_counts() -> None:
    quiet, busy = an_endpoint("a"), an_endpoint("b")
    for number in range(4):
        chatting(busy, str(number), cached=0, uncached=10)
    expected = [0.0, busy.load.num_decoding * MIXED_STALL_WEIGHT * 3.0]
    assert stall_of_prefill({"own_prefill": [2.0, 3.0]}, [quiet, busy]) == pytest.approx(expected)


def test_what_is_cached_stalls_nobody() -> None:
    busy = an_endpoint("a")
    for name in "abc":
        chatting(busy, name, cached=0, uncached=10)
    cached, uncached = (decode_stall(a_request(1000), [busy], {"a": num}, 0.0)[0] for num in (900, 0))
    assert cached < uncached / 5
