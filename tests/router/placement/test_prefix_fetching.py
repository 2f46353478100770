"""Which engine is told to fetch a prefix, from whom, and what it then costs."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.router.parts import a_request, an_endpoint, an_exchanging

from kvasir_router.placement.costs import work_left
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.placement.placement import Fetch, Placement, Policy
from kvasir_router.placement.policies import RoundRobin
from kvasir_router.placement.prefix_fetching import LEAST_TOKENS, Fetches, FetchingPolicy, PrefixFetching, peers
from kvasir_router.prefix_index.index import Held
from kvasir_router.service.prefill_rate import work
from kvasir_router.service.registry import Endpoint
from kvasir_router.service.transfer_times import TransferTimes

NUM_TOKENS = 2000
HOLDS = 1500
RATE = 1000.0


class Takes(TransferTimes):
    """Every transfer takes as long, or as the pair is said to."""

    def __init__(self, seconds: float = 0.0, **by_peer: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._by_peer = by_peer

    def estimate_seconds(self, prefill_url: str, decode_url: str, num_tokens: int) -> float:
        return self._by_peer.get(prefill_url, self._seconds)


def placed(
    *endpoints: Endpoint,
    written: Mapping[str, int],
    rank: int = 0,
    cached: Mapping[str, int] | None = None,
    others: Sequence[Endpoint] = (),
    policy: Policy | None = None,
    transfers: TransferTimes | None = None,
    num_tokens: int = NUM_TOKENS,
    **fields: Any,
) -> Placement:
    """`others` have no room. Where `cached` is not given, it is what is written. `rank`: of all, which has it."""
    held = {url: Held(num_tokens, rank) for url, num_tokens in written.items()}
    fetches = Fetches(peers([*endpoints, *others], 0.0), lambda: held, transfers or TransferTimes())
    fetching = FetchingPolicy(policy or FinishTime(), fetches)
    request = a_request(num_tokens, **{"can_transfer_kv": True} | fields)
    return fetching.place(request, endpoints, written if cached is None else cached, 0.0)


def fetched(placement: Placement) -> tuple[str, str | None, int]:
    fetch = placement.fetch
    return placement.leg.endpoint.url, fetch and fetch.peer_url, 0 if fetch is None else fetch.num_tokens


def fetched_by_b(**options: Any) -> int:
    """Of what a has, which has no room."""
    holder = an_exchanging("a", **options.pop("holder", {}))
    placement = placed(an_exchanging("b"), others=[holder], **{"written": {"a": HOLDS}} | options)
    return 0 if placement.fetch is None else placement.fetch.num_tokens


def test_an_idle_holder_gets_the_request_itself() -> None:
    assert fetched(placed(an_exchanging("a"), an_exchanging("b"), written={"a": HOLDS})) == ("a", None, 0)


@pytest.mark.parametrize("rank", [0, 3])
def test_of_an_engine_of_several_ranks_the_one_that_has_it_is_asked(rank: int) -> None:
    holder = an_exchanging("a", port=5600)
    fetch = placed(an_exchanging("b"), others=[holder], written={"a": HOLDS}, rank=rank).fetch
    assert fetch is not None
    assert fetch.peer_port == 5600 + rank


def test_of_a_busy_holder_another_fetches() -> None:
    busy = an_exchanging("a", prefill_tokens=1400)
    placement = placed(busy, an_exchanging("b"), written={"a": HOLDS})
    assert fetched(placement) == ("b", "a", HOLDS)
    assert placement.fetch is not None
    assert placement.fetch.peer_port == 5600
    leg = placement.leg
    assert (leg.cached_tokens, leg.received_tokens, leg.uncached_tokens) == (0, HOLDS, NUM_TOKENS - HOLDS)


def test_while_all_have_a_queue_the_holder_is_preferred_as_if_nobody_fetched() -> None:
    """What is held twice takes the place of something else."""
    for queue, expected in ((0, "b"), (200, "a")):
        holder, other = an_exchanging("a", prefill_tokens=1400 + queue), an_exchanging("b", prefill_tokens=queue)
        assert fetched(placed(holder, other, written={"a": HOLDS}))[0] == expected


def test_without_fetching_the_same_request_would_have_waited_for_the_holder() -> None:
    endpoints = an_endpoint("a", prefill_tokens=1400), an_endpoint("b")
    assert fetched(placed(*endpoints, written={"a": HOLDS})) == ("a", None, 0)


def test_what_is_fetched_costs_its_transfer_and_the_rest_its_prefill() -> None:
    placement = placed(
        an_exchanging("b"), others=[an_exchanging("a")], written={"a": HOLDS, "b": 100}, transfers=Takes(0.25)
    )
    assert fetched(placement) == ("b", "a", HOLDS - 100)
    assert placement.cost_seconds == pytest.approx(0.25 + work(NUM_TOKENS - HOLDS, HOLDS) / RATE)


def test_a_transfer_is_hidden_by_the_queue_as_far_as_that_is_long() -> None:
    queue = work(500) / RATE
    for transfer in (queue - 0.1, queue, queue + 0.1):
        placement = placed(
            an_exchanging("b", prefill_tokens=500),
            others=[an_exchanging("a")],
            written={"a": HOLDS},
            transfers=Takes(transfer),
        )
        own = work(NUM_TOKENS - HOLDS, HOLDS) / RATE + 0.05 * 500 / RATE
        assert placement.cost_seconds == pytest.approx(max(queue, transfer) + own)


@pytest.mark.parametrize(("num_more", "is_fetched"), [(LEAST_TOKENS - 1, False), (LEAST_TOKENS, True)])
def test_a_peer_must_have_much_more(num_more: int, is_fetched: bool) -> None:
    assert fetched_by_b(written={"a": 100 + num_more, "b": 100}, transfers=Takes()) == (num_more if is_fetched else 0)


@pytest.mark.parametrize(("num_cached", "expected"), [(0, NUM_TOKENS - 1), (NUM_TOKENS - LEAST_TOKENS, 0)])
def test_the_last_token_is_always_computed(num_cached: int, expected: int) -> None:
    """So of a prompt that is cached whole one less can be had: at the bound too few."""
    assert fetched_by_b(written={"a": NUM_TOKENS + 48, "b": num_cached}, transfers=Takes()) == expected


@pytest.mark.parametrize(("sooner", "is_fetched"), [(-1e-9, False), (0.0, False), (1e-9, True)])
def test_it_must_be_done_sooner(sooner: float, is_fetched: bool) -> None:
    saved = work_left(NUM_TOKENS, 0) / RATE - work_left(NUM_TOKENS, HOLDS) / RATE
    assert bool(fetched_by_b(transfers=Takes(saved - sooner))) == is_fetched


@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("it was sent there just now, and is not written", {"written": {}, "cached": {"a": HOLDS}}),
        ("less is written than is worth it", {"written": {"a": LEAST_TOKENS - 1}, "cached": {"a": HOLDS}}),
        ("nobody has anything", {"written": {}}),
        ("KV of one revision is not another's", {"holder": {"revision": "other"}}),
        ("the request's KV cannot come from elsewhere", {"can_transfer_kv": False}),
        ("an empty prompt", {"num_tokens": 0}),
    ],
)
def test_nothing_is_fetched_where(why: str, options: dict[str, Any]) -> None:
    assert fetched_by_b(transfers=Takes(), **options) == 0, why


@pytest.mark.parametrize("who", ["a", "b"])
def test_both_engines_must_exchange_kv(who: str) -> None:
    made = {url: an_endpoint(url) if url == who else an_exchanging(url) for url in "ab"}
    assert placed(made["b"], others=[made["a"]], written={"a": HOLDS}, transfers=Takes()).fetch is None


def test_of_holders_the_one_is_asked_from_whom_it_is_done_soonest() -> None:
    holders = an_exchanging("far"), an_exchanging("near")
    written = {"far": HOLDS, "near": HOLDS - 100}
    for far, expected in ((0.05, "far"), (0.5, "near")):
        placement = placed(an_exchanging("b"), others=holders, written=written, transfers=Takes(far=far, near=0.05))
        assert fetched(placement)[1] == expected


def test_a_few_of_many_holders_are_compared_those_with_the_most() -> None:
    holders = [an_exchanging(str(number)) for number in range(8)]
    written = {holder.url: HOLDS + number for number, holder in enumerate(holders)}
    seconds = {str(number): 0.01 + 0.01 * number for number in range(8)}
    placement = placed(an_exchanging("b"), others=holders, written=written, transfers=Takes(**seconds))
    assert fetched(placement) == ("b", "6", HOLDS + 6)


def test_a_policy_without_costs_chooses_as_ever_and_its_choice_fetches() -> None:
    found = []
    for last in (2, 0):
        endpoints = an_exchanging("a", last_dispatch=last), an_exchanging("b", last_dispatch=1)
        found.append(fetched(placed(*endpoints, written={"a": HOLDS}, policy=RoundRobin())))
    assert found == [("b", "a", HOLDS), ("a", None, 0)]


def test_costs_are_shown_with_what_would_be_fetched() -> None:
    holder, other = an_exchanging("a"), an_exchanging("b")
    policy = FetchingPolicy(FinishTime(), Fetches([holder, other], lambda: {"a": Held(HOLDS)}, Takes(0.25)))
    request = a_request(NUM_TOKENS, can_transfer_kv=True)
    costs = policy.costs(request, [holder, other], {"a": HOLDS}, 0.0)
    saved = costs["b"]["own_prefill"] - costs["a"]["own_prefill"]
    assert (costs["a"]["prefix_fetch"], costs["b"]["prefix_fetch"]) == (0.0, pytest.approx(0.25 - saved))
    without_costs = FetchingPolicy(RoundRobin(), Fetches([holder, other], lambda: {}, Takes()))
    assert without_costs.costs(request, [other], {}, 0.0) == {}


def test_peers_that_have_just_failed_are_not_asked() -> None:
    failed, tried, full = an_exchanging("failed"), an_exchanging("tried"), an_exchanging("full", max_in_flight=0)
    failed.suspect_until = 0.1
    endpoints = [failed, tried, full, an_endpoint("silent")]
    assert peers(endpoints, 0.0, {"tried"}) == [full]
    assert peers(endpoints, 0.1, {"tried"}) == [failed, full]


@pytest.mark.parametrize(("queue_seconds", "is_learned"), [(0.0, True), (0.1, False)])
def test_a_pairs_transfers_are_learned_where_no_queue_hides_them(queue_seconds: float, is_learned: bool) -> None:
    fetching = PrefixFetching()
    before = fetching.transfers.estimate_seconds("a", "b", 10_000)
    for _ in range(20):
        fetching.learn(Fetch("a", 5600, 10_000, 1.0, queue_seconds), "b", 5 * before, 0.0)
    after = fetching.transfers.estimate_seconds("a", "b", 10_000)
    assert after == (pytest.approx(5 * before, rel=0.2) if is_learned else before)


def test_a_first_token_that_comes_early_is_a_transfer_of_no_time() -> None:
    estimates = []
    for seconds in (0.0, -1.0):
        fetching = PrefixFetching()
        fetching.learn(Fetch("a", 5600, 10_000, 1.0, 0.0), "b", seconds, 0.0)
        fetching.learn(Fetch("a", 5600, 10_000, 1.0, 0.0), "b", 1.0, 0.0)
        estimates.append(fetching.transfers.estimate_seconds("a", "b", 10_000))
    assert estimates[0] == estimates[1]
