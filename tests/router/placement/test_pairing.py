"""Who prefills a prompt: the engine that decodes it, or another of its revision that would be done sooner."""

from dataclasses import replace
from typing import Any

import pytest
from tests.router.parts import a_request, an_endpoint, an_exchanging, chatting

from kvasir_router.endpoints.address import Role
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.placement.pairing import PairedPolicy, Pairing
from kvasir_router.placement.placement import LocalPrefill, Placement, Policy
from kvasir_router.placement.policies import RoundRobin, SessionAffinity
from kvasir_router.placement.prefix_fetching import Fetches
from kvasir_router.prefix_index.index import Held
from kvasir_router.service.prefill_rate import work
from kvasir_router.service.registry import Endpoint
from kvasir_router.service.transfer_times import TransferTimes

FULL_AND_IDLE: list[tuple[str, dict[str, Any]]] = [("held", {"prefill_tokens": 5000}), ("p", {})]


def a_decode(url: str = "d", *, num_chats: int = 0, **load: Any) -> Endpoint:
    endpoint = an_endpoint(url, role=Role.DECODE, **load)
    for number in range(num_chats):
        chatting(endpoint, str(number), cached=0, uncached=1)
    return endpoint


def a_prefill(url: str = "p", **load: Any) -> Endpoint:
    return an_endpoint(url, role=Role.PREFILL, **load)


def paired(*prefills: Endpoint, policy: Policy | None = None, min_tokens: int | None = None) -> PairedPolicy:
    return Pairing(min_tokens).policy(policy or FinishTime(), prefills)


def placed(
    policy: PairedPolicy,
    *decodes: Endpoint,
    num_tokens: int = 1000,
    cached: dict[str, int] | None = None,
    **fields: Any,
) -> Placement:
    request = a_request(num_tokens, **({"can_transfer_kv": True} | fields))
    return policy.place(request, decodes, cached or {}, 0.0)


def fetching(
    *prefills: Endpoint,
    written: dict[str, int],
    seconds: float = 0.0,
    policy: Policy | None = None,
    min_tokens: int | None = None,
) -> PairedPolicy:
    """`seconds`: of every transfer between those that prefill. The second data-parallel rank has what is written."""
    transfers = TransferTimes()
    transfers.estimate_seconds = lambda *_: seconds  # type: ignore[method-assign]
    held = {url: Held(num_tokens, rank=1) for url, num_tokens in written.items()}
    return Pairing(min_tokens).policy(policy or FinishTime(), prefills, Fetches(prefills, lambda: held, transfers))


def urls(placement: Placement) -> tuple[str, str | None]:
    return placement.leg.endpoint.url, None if placement.prefill is None else placement.prefill.endpoint.url


@pytest.mark.parametrize(
    ("why", "decode", "prefill", "cached", "is_remote"),
    [
        ("two idle engines: a transfer gains nothing", {}, {}, {}, False),
        ("prompts ahead where it is decoded", {"prefill_tokens": 1000}, {}, {}, True),
        ("so many that its own prefill adds little", {"prefill_tokens": 100_000}, {}, {}, True),
        ("as many where it would be prefilled", {"prefill_tokens": 1000}, {"prefill_tokens": 1000}, {}, False),
        ("streams would stand still", {"num_chats": 20}, {}, {}, True),
        ("a faster prefill engine", {}, {"prefill_rate": 2000.0}, {}, True),
        ("its prefix is cached where it is decoded", {"num_chats": 20}, {}, {"d": 990}, False),
        ("its prefix is cached where it is prefilled", {}, {}, {"p": 900}, True),
        (
            "KV of the prefill engine is full",
            {"num_chats": 20},
            {"kv_usage": 0.99, "kv_capacity_tokens": 10**6},
            {},
            False,
        ),
    ],
)
def test_a_prompt_goes_where_its_first_token_comes_sooner(
    why: str, decode: dict[str, Any], prefill: dict[str, Any], cached: dict[str, int], is_remote: bool
) -> None:
    placement = placed(paired(a_prefill(**prefill)), a_decode(**decode), cached=cached)
    assert urls(placement) == ("d", "p" if is_remote else None), why
    assert placement.local_prefill is (None if is_remote else LocalPrefill.CHEAPER)


@pytest.mark.parametrize(
    ("why", "num_cached", "prefill", "is_remote"),
    [
        ("nothing is to be computed", 1000, {}, False),
        ("next to nothing is, and the other would be done later", 990, {"prefill_tokens": 100}, False),
        ("the other is done sooner", 900, {"prefill_rate": 10_000.0}, True),
    ],
)
def test_how_busy_an_engine_is_with_streams_says_nothing_of_who_is_to_prefill(
    why: str, num_cached: int, prefill: dict[str, Any], is_remote: bool
) -> None:
    """Beside 50 s of them all that either would take is a tie."""
    decode, cached = a_decode(resident_tokens=10**6), {"d": num_cached, "p": num_cached}
    placement = placed(paired(a_prefill(**prefill)), decode, cached=cached)
    assert urls(placement) == ("d", "p" if is_remote else None), why


def test_legs_tell_what_each_engine_has_and_does() -> None:
    placement = placed(paired(a_prefill(), min_tokens=0), a_decode(), cached={"d": 300, "p": 600})
    assert placement.prefill is not None
    assert (placement.leg.cached_tokens, placement.leg.uncached_tokens, placement.leg.received_tokens) == (300, 0, 700)
    assert (placement.prefill.cached_tokens, placement.prefill.uncached_tokens) == (600, 400)


def test_the_cost_of_a_pair_is_queue_and_prefill_of_one_transfer_and_load_of_the_other() -> None:
    policy = paired(a_prefill(prefill_tokens=500), min_tokens=0)
    decode = a_decode(resident_tokens=2000)
    cost = placed(policy, decode, cached={"d": 400}).cost_seconds
    transfer = policy.transfers.estimate_seconds("p", "d", 600)
    assert cost == pytest.approx(work(500) / 1000 + work(1000) / 1000 + transfer + 0.05 * 2000 / 1000)


def test_a_decode_engine_with_prompts_ahead_lets_a_remote_one_wait() -> None:
    policy = paired(a_prefill(), min_tokens=0)
    busy, idle = a_decode("busy", prefill_tokens=9000), a_decode("idle")
    assert placed(policy, busy).cost_seconds == pytest.approx(work(9000) / 1000 + 0.05 * 9000 / 1000)
    assert urls(placed(policy, busy, idle)) == ("idle", "p")


def test_a_slow_pair_is_left_for_another() -> None:
    policy = paired(a_prefill("p"), a_prefill("q"), min_tokens=0)
    for _ in range(20):
        policy.transfers.observe("p", "d", 1000, 1.0, 0.0)
    assert urls(placed(policy, a_decode())) == ("d", "q")


def test_pairs_that_are_slow_leave_the_prompt_where_it_is_decoded() -> None:
    policy, busy = paired(a_prefill()), a_decode(prefill_tokens=1000)
    assert urls(placed(policy, busy)) == ("d", "p")
    for _ in range(20):
        policy.transfers.observe("p", "d", 1000, 3.0, 0.0)
    assert urls(placed(policy, busy)) == ("d", None)


@pytest.mark.parametrize(("num_cached", "prefill"), [(501, None), (500, "p"), (0, "p")])
def test_a_number_of_tokens_overrides_the_cost(num_cached: int, prefill: str | None) -> None:
    policy = paired(a_prefill(prefill_tokens=10**6), min_tokens=500)
    placement = placed(policy, a_decode(), cached={"d": num_cached})
    assert urls(placement) == ("d", prefill)
    assert placement.local_prefill is (LocalPrefill.SHORT if prefill is None else None)


def test_pairs_never_cross_revisions() -> None:
    prefills = a_prefill("p1", revision="1"), a_prefill("p2", revision="2", prefill_tokens=10_000)
    decode = a_decode(revision="2")
    assert urls(placed(paired(*prefills, min_tokens=0), decode)) == ("d", "p2")
    alone = placed(paired(prefills[0], min_tokens=0), decode)
    assert (urls(alone), alone.local_prefill) == (("d", None), LocalPrefill.NO_PREFILL_ENDPOINT)


def test_an_engine_that_serves_is_given_no_partner() -> None:
    placement = placed(paired(a_prefill(), min_tokens=0), an_endpoint("s", prefill_tokens=9000))
    assert (urls(placement), placement.local_prefill) == (("s", None), None)


def test_what_cannot_be_handed_over_stays_where_it_is_decoded() -> None:
    placement = placed(paired(a_prefill(), min_tokens=0), a_decode(), can_transfer_kv=False)
    assert (urls(placement), placement.local_prefill) == (("d", None), LocalPrefill.UNSUPPORTED)


def test_of_equal_pairs_those_idle_longest_are_chosen() -> None:
    prefills = a_prefill("p1", last_dispatch=4), a_prefill("p2", last_dispatch=3)
    decodes = a_decode("d1", last_dispatch=9), a_decode("d2", last_dispatch=8)
    assert urls(placed(paired(*prefills, min_tokens=0), *decodes)) == ("d2", "p2")


def test_only_the_best_of_many_prefill_engines_are_compared() -> None:
    prefills = [a_prefill(f"p{number}", prefill_tokens=1000 * (9 - number)) for number in range(10)]
    costs = paired(*prefills, min_tokens=0).pair_costs(a_request(1000, can_transfer_kv=True), [a_decode()], {}, 0.0)
    assert list(costs) == [("d", f"p{number}") for number in (9, 8, 7, 6)]


@pytest.mark.parametrize("prefill_tokens", [0, 9000])
def test_terms_of_every_pair_add_up_to_what_was_compared(prefill_tokens: int) -> None:
    policy = paired(a_prefill(prefill_tokens=500))
    load = {"prefill_tokens": prefill_tokens, "kv_usage": 0.9, "kv_capacity_tokens": 10**6}
    decodes = [a_decode("d", num_chats=3, **load), an_endpoint("s")]
    costs = policy.pair_costs(a_request(1000, can_transfer_kv=True), decodes, {}, 0.0)
    assert set(costs) == {("d", None), ("d", "p"), ("s", None)}
    assert {"decode_stall", "own_prefill", "kv_barrier"} <= set(costs["d", None])
    assert {"kv_transfer", "decode_queue", "prefill_queue", "decode_load"} <= set(costs["d", "p"])
    for decode in decodes:
        chosen = placed(policy, decode)
        assert chosen.cost_seconds == pytest.approx(sum(costs[urls(chosen)].values()))


@pytest.mark.parametrize("policy", [RoundRobin(), SessionAffinity()])
def test_other_policies_choose_each_leg_their_own_way(policy: Policy) -> None:
    prefills = [a_prefill("p1", last_dispatch=4), a_prefill("p2", last_dispatch=3)]
    decodes = [a_decode("d1", last_dispatch=9), a_decode("d2", last_dispatch=8)]
    pair = paired(*prefills, policy=policy, min_tokens=0)
    seen = {urls(placed(pair, *decodes, session=str(number))) for number in range(40)}
    assert {prefill for _, prefill in seen} <= {"p1", "p2"}
    if isinstance(policy, RoundRobin):
        assert seen == {("d2", "p2")}
    else:
        assert {decode for decode, _ in seen} == {"d1", "d2"}
    assert pair.pair_costs(a_request(), decodes, {}, 0.0) == {}


def test_costs_decide_for_other_policies_too_whether_the_second_leg_is_used() -> None:
    prefill = a_prefill()
    assert urls(placed(paired(prefill, policy=RoundRobin()), a_decode())) == ("d", None)
    assert urls(placed(paired(prefill, policy=RoundRobin()), a_decode(num_chats=20))) == ("d", "p")
    assert placed(paired(prefill, policy=RoundRobin()), a_decode(num_chats=20)).cost_seconds is None


@pytest.mark.parametrize("policy", [FinishTime(), RoundRobin()], ids=["costs", "turns"])
def test_who_prefills_for_another_fetches_what_a_busy_peer_has_cached(policy: Policy) -> None:
    holder = an_exchanging("held", role=Role.PREFILL, prefill_tokens=5000, last_dispatch=2)
    other = an_exchanging("p", role=Role.PREFILL, last_dispatch=1)
    cached = {"held": 800}
    placement = placed(fetching(holder, other, written=cached, policy=policy, min_tokens=0), a_decode(), cached=cached)
    assert urls(placement) == ("d", "p")
    assert placement.fetch is not None
    fetch = placement.fetch
    assert (fetch.peer_url, fetch.peer_port, fetch.num_tokens) == ("held", 5601, 800)
    assert placement.prefill is not None
    leg = placement.prefill
    assert (leg.cached_tokens, leg.received_tokens, leg.uncached_tokens) == (0, 800, 200)
    assert (placement.leg.received_tokens, placement.leg.uncached_tokens) == (1000, 0)


@pytest.mark.parametrize(("seconds", "is_remote"), [(0.0, True), (10.0, False)])
def test_what_is_fetched_makes_remote_prefill_cheaper(seconds: float, is_remote: bool) -> None:
    """Of two idle engines the one that decodes would have computed the prompt itself."""
    holder, other = (an_exchanging(url, role=Role.PREFILL, **load) for url, load in FULL_AND_IDLE)
    cached = {"held": 800}
    policy = fetching(holder, other, written=cached, seconds=seconds)
    placement = placed(policy, a_decode(), cached=cached)
    assert urls(placement) == ("d", "p" if is_remote else None)
    assert (placement.fetch is not None) is is_remote


def test_a_holder_that_prefills_itself_fetches_nothing() -> None:
    holder, other = an_exchanging("held", role=Role.PREFILL), an_exchanging("p", role=Role.PREFILL)
    placement = placed(fetching(holder, other, written={"held": 800}, min_tokens=0), a_decode(), cached={"held": 800})
    assert (urls(placement), placement.fetch) == (("d", "held"), None)


def test_pairs_are_shown_with_what_would_be_fetched() -> None:
    holder, other = (an_exchanging(url, role=Role.PREFILL, **load) for url, load in FULL_AND_IDLE)
    policy, cached = fetching(holder, other, written={"held": 800}, min_tokens=0), {"held": 800}
    costs = policy.pair_costs(a_request(1000, can_transfer_kv=True), [a_decode()], cached, 0.0)
    saved = (work(1000) - work(200, 800)) / 1000.0
    assert costs["d", "p"]["prefix_fetch"] == pytest.approx(-saved)
    assert costs["d", "held"]["prefix_fetch"] == 0.0


def an_answers_engine(**load: Any) -> Endpoint:
    """That decoded the turn before, and has its prompt and answer."""
    return an_exchanging("held", role=Role.DECODE, **load)


def test_who_prefills_for_another_fetches_a_former_answer_from_the_engine_that_decoded_it() -> None:
    holder, other, prefill = (
        an_answers_engine(resident_tokens=10**6),
        an_exchanging("d", role=Role.DECODE),
        an_exchanging("p", role=Role.PREFILL),
    )
    cached = {"held": 900, "p": 500}
    policy = replace(fetching(prefill, holder, written=cached, min_tokens=0), prefills=[prefill])
    placement = placed(policy, holder, other, cached=cached)
    assert (urls(placement), placement.fetch and placement.fetch.num_tokens) == (("d", "p"), 400)
    assert placement.prefill is not None
    leg = placement.prefill
    assert (leg.cached_tokens, leg.received_tokens, leg.uncached_tokens) == (500, 400, 100)
    assert placement.leg.received_tokens == 1000


def test_the_engine_that_decoded_the_former_answer_decodes_the_next_and_gets_only_the_rest() -> None:
    holder, other, prefill = an_answers_engine(), a_decode("d"), an_exchanging("p", role=Role.PREFILL)
    cached = {"held": 900, "p": 500}
    policy = replace(fetching(prefill, holder, written=cached, min_tokens=0), prefills=[prefill])
    placement = placed(policy, other, holder, cached=cached)
    assert urls(placement) == ("held", "p")
    assert (placement.leg.cached_tokens, placement.leg.received_tokens) == (900, 100)


@pytest.mark.parametrize(("seconds", "is_local"), [(0.0, True), (10.0, False)])
def test_what_is_fetched_makes_local_prefill_cheaper(seconds: float, is_local: bool) -> None:
    """The prefill engine, which fetches nothing, computes the whole prompt in half the time."""
    holder, other = an_answers_engine(resident_tokens=10**6), an_exchanging("d", role=Role.DECODE)
    cached = {"held": 900}
    policy = fetching(holder, written=cached, seconds=seconds)
    placement = placed(replace(policy, prefills=[a_prefill(prefill_rate=2000.0)]), holder, other, cached=cached)
    assert urls(placement) == ("d", None if is_local else "p")
    assert (placement.fetch is not None) is is_local
    if is_local:
        assert placement.local_prefill is LocalPrefill.CHEAPER
        assert (placement.leg.received_tokens, placement.leg.uncached_tokens) == (900, 100)


def test_too_short_a_prompt_to_be_prefilled_elsewhere_may_be_fetched_all_the_same() -> None:
    holder, other = an_answers_engine(resident_tokens=10**6), an_exchanging("d", role=Role.DECODE)
    policy = replace(fetching(holder, written={"held": 900}, min_tokens=2000), prefills=[a_prefill()])
    placement = placed(policy, holder, other, cached={"held": 900})
    assert (urls(placement), placement.local_prefill) == (("d", None), LocalPrefill.SHORT)
    assert placement.fetch is not None


def test_an_engine_that_decoded_under_another_revision_is_not_asked() -> None:
    holder = an_answers_engine(revision="old")
    decode, prefill = an_exchanging("d", role=Role.DECODE), an_exchanging("p", role=Role.PREFILL)
    policy = replace(fetching(holder, written={"held": 900}, min_tokens=0), prefills=[prefill])
    placement = placed(policy, decode, cached={"held": 900})
    assert (urls(placement), placement.fetch) == (("d", "p"), None)
