from typing import Any

import pytest
from tests.router.parts import a_request, an_endpoint, an_exchanging

from kvasir_router.endpoints.address import Role
from kvasir_router.picker import Picker
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.placement.pairing import Pairing
from kvasir_router.placement.prefix_fetching import PrefixFetching
from kvasir_router.prefix_index.index import Held
from kvasir_router.service.registry import Endpoint


def picked(*endpoints: Endpoint, avoid: frozenset[str] = frozenset()) -> str | None:
    placement = Picker(FinishTime()).pick(a_request(5), endpoints, {}, 0.0, avoid)
    return None if placement is None else placement.leg.endpoint.url


def test_picks_none_when_no_endpoint_is_usable() -> None:
    assert picked() is None


def test_a_full_endpoint_is_no_candidate() -> None:
    busy = an_endpoint("b", prefill_tokens=9000)
    assert picked(an_endpoint("a", num_in_flight=2, max_in_flight=2), busy) == "b"
    assert picked(an_endpoint("a", num_in_flight=1, max_in_flight=2), busy) == "a"


def test_tried_endpoints_come_last() -> None:
    assert picked(an_endpoint("a"), an_endpoint("b", prefill_tokens=9000), avoid=frozenset({"a"})) == "b"


def test_a_tried_endpoint_is_taken_again_when_it_is_the_only_one() -> None:
    assert picked(an_endpoint("a"), avoid=frozenset({"a"})) == "a"


def test_an_endpoint_that_has_just_failed_comes_last_and_is_taken_where_it_is_the_only_one() -> None:
    failed, busy = an_endpoint("a"), an_endpoint("b", prefill_tokens=9000)
    failed.suspect_until = 0.1
    assert picked(failed, busy) == "b"
    assert picked(failed) == "a"
    failed.suspect_until = 0.0
    assert picked(failed, busy) == "a"


@pytest.mark.parametrize(
    "trouble", [{"num_in_flight": 1, "max_in_flight": 1}, {"suspect_until": 0.1}, {"url": "tried"}]
)
def test_a_prefill_engine_in_trouble_is_no_partner_even_if_it_is_the_only_one(trouble: dict[str, Any]) -> None:
    suspect_until = trouble.pop("suspect_until", 0.0)
    prefill = an_endpoint(trouble.pop("url", "p"), role=Role.PREFILL, **trouble)
    prefill.suspect_until = suspect_until
    picker, request = Picker(FinishTime(), pairing=Pairing(0)), a_request(5, can_transfer_kv=True)
    placement = picker.pick(request, [an_endpoint("d", role=Role.DECODE)], {}, 0.0, frozenset({"tried"}), [prefill])
    assert placement is not None
    assert placement.prefill is None


def test_a_pair_is_of_the_revision_whose_turn_it_is() -> None:
    decodes = [
        an_endpoint(f"d{weight}", role=Role.DECODE, revision=str(weight), traffic_weight=weight) for weight in (50, 49)
    ]
    prefills = [an_endpoint(f"p{weight}", role=Role.PREFILL, revision=str(weight)) for weight in (50, 49)]
    picker, request = Picker(FinishTime(), pairing=Pairing(0)), a_request(5, can_transfer_kv=True)
    pairs = []
    for _ in range(4):
        placement = picker.pick(request, decodes, {}, 0.0, prefills=prefills)
        assert placement is not None
        pairs.append("".join(leg.endpoint.url for leg in placement.legs))
    assert sorted(pairs) == ["d49p49", "d49p49", "d50p50", "d50p50"]


def fetched_from(picker: Picker, *endpoints: Endpoint, **options: Any) -> str | None:
    request, cached = a_request(1000, can_transfer_kv=True), {"a": 900}
    options = {"written": lambda: {url: Held(num_tokens) for url, num_tokens in cached.items()}} | options
    placement = picker.pick(request, endpoints, cached, 0.0, **options)
    assert placement is not None
    return None if placement.fetch is None else placement.fetch.peer_url


def test_a_holder_without_room_is_fetched_from() -> None:
    endpoints = an_exchanging("a", max_in_flight=0), an_exchanging("b")
    assert fetched_from(Picker(FinishTime(), fetching=PrefixFetching()), *endpoints) == "a"
    assert fetched_from(Picker(FinishTime()), *endpoints) is None
    assert fetched_from(Picker(FinishTime(), fetching=PrefixFetching()), *endpoints, written=None) is None


def test_a_holder_where_the_request_has_failed_is_not_fetched_from() -> None:
    endpoints = an_exchanging("a"), an_exchanging("b")
    picker = Picker(FinishTime(), fetching=PrefixFetching())
    assert fetched_from(picker, *endpoints, avoid=frozenset({"a"})) is None


def test_the_holder_of_another_revision_is_not_fetched_from_by_the_one_whose_turn_it_is() -> None:
    endpoints = [an_exchanging("a", revision="old"), an_exchanging("b", revision="new", traffic_weight=100)]
    picker = Picker(FinishTime(), fetching=PrefixFetching())
    assert fetched_from(picker, *endpoints) is None
    endpoints = [an_exchanging("a", revision="new", max_in_flight=0), endpoints[1]]
    assert fetched_from(picker, *endpoints) == "a"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("min_tokens", [0, 2000], ids=["remote", "local"])
def test_who_prefills_fetches_from_engines_of_either_role(role: Role, min_tokens: int) -> None:
    holder, prefill = an_exchanging("a", role=role, max_in_flight=0), an_exchanging("p", role=Role.PREFILL)
    prefills = [each for each in (holder, prefill) if each.role is Role.PREFILL]
    decodes = [each for each in (holder, an_exchanging("d", role=Role.DECODE)) if each.role is Role.DECODE]
    picker = Picker(FinishTime(), pairing=Pairing(min_tokens), fetching=PrefixFetching())
    assert fetched_from(picker, *decodes, prefills=prefills) == "a"
    assert fetched_from(Picker(FinishTime(), pairing=Pairing(min_tokens)), *decodes, prefills=prefills) is None
