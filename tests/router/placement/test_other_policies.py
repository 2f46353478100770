from collections import Counter

from tests.router.parts import a_request, an_endpoint

from kvasir_router.placement.placement import Policy
from kvasir_router.placement.policies import SessionAffinity
from kvasir_router.service.registry import Endpoint

URLS = tuple("abcdefgh")


def placed(policy: Policy, *endpoints: Endpoint, session: str | None = None, now: float = 0.0) -> str:
    return policy.place(a_request(session=session), endpoints, {"a": 100}, now).leg.endpoint.url


def fleet(**loads: int) -> list[Endpoint]:
    return [an_endpoint(url, num_in_flight=loads.get(url, 0)) for url in URLS]


def test_a_session_stays_on_one_endpoint_on_every_router_and_sessions_spread() -> None:
    homes = {str(number): placed(SessionAffinity(), *fleet(), session=str(number)) for number in range(400)}
    assert all(placed(SessionAffinity(), *reversed(fleet()), session=name) == home for name, home in homes.items())
    assert min(Counter(homes.values()).values()) > 25


def test_an_endpoint_that_is_gone_moves_only_its_own_sessions() -> None:
    without = [endpoint for endpoint in fleet() if endpoint.url != "c"]
    for number in range(100):
        before = placed(SessionAffinity(), *fleet(), session=str(number))
        after = placed(SessionAffinity(), *without, session=str(number))
        assert after == before or before == "c"


def test_a_session_leaves_an_endpoint_that_is_over_the_bound_and_comes_back() -> None:
    home = placed(SessionAffinity(), *fleet(), session="s")
    busy = dict.fromkeys(URLS, 3)
    assert placed(SessionAffinity(), *fleet(**busy), session="s") == home  # 25 with this one: up to 4 each
    assert placed(SessionAffinity(), *fleet(**busy | {home: 5}), session="s") != home


def test_without_a_session_the_least_busy_is_taken() -> None:
    assert placed(SessionAffinity(), *fleet(**dict.fromkeys(URLS, 2) | {"e": 1})) == "e"
