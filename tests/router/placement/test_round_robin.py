from tests.router.parts import a_request, an_endpoint

from kvasir_router.placement.policies import RoundRobin


def test_takes_turns() -> None:
    endpoints = [an_endpoint(url) for url in "abc"]
    order = []
    for number in range(1, 7):
        endpoint = RoundRobin().place(a_request(5), endpoints, {}, now=0.0).leg.endpoint
        endpoint.load.last_dispatch = number
        order.append(endpoint.url)
    assert order == ["a", "b", "c", "a", "b", "c"]
