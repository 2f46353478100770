"""Which decisions are kept, and what of them."""

from functools import partial

import pytest
from tests.router.parts import a_request, an_endpoint, an_exchanging

from kvasir_router.debug.decisions import KEPT_A_SECOND, MAX_DECISIONS, DecisionLog
from kvasir_router.endpoints.address import Role
from kvasir_router.picker import Picker
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.placement.pairing import Pairing
from kvasir_router.placement.placement import Policy
from kvasir_router.placement.policies import RoundRobin
from kvasir_router.placement.prefix_fetching import PrefixFetching
from kvasir_router.prefix_index.index import Held


def decide(
    log: DecisionLog, now: float = 0.0, policy: Policy | None = None, num_tokens: int = 500, num_cached: int = 400
) -> None:
    """On b, which has nothing to do; a has the prompt's beginning."""
    endpoints = [an_endpoint("a", prefill_tokens=8000), an_endpoint("b")]
    picker = Picker(policy or FinishTime(), partial(log.add, "llama"))
    picker.pick(a_request(num_tokens), endpoints, {"a": num_cached}, now)


def test_a_decision_has_every_endpoints_cost_term_by_term() -> None:
    log = DecisionLog()
    decide(log)
    [decision] = log
    assert (decision.service, decision.url, decision.num_prompt_tokens, decision.cached_tokens) == (
        "llama",
        "b",
        500,
        0,
    )
    assert [(cost.url, cost.cached_tokens) for cost in decision.costs] == [("a", 400), ("b", 0)]
    [chosen] = [sum(cost.terms_seconds.values()) for cost in decision.costs if cost.url == decision.url]
    assert decision.cost_seconds == pytest.approx(chosen)


def test_a_cost_never_counts_more_cached_tokens_than_the_prompt_has() -> None:
    log = DecisionLog()
    Picker(FinishTime(), lambda *decision: log.add("", *decision)).pick(
        a_request(5), [an_endpoint("a")], {"a": 64}, 0.0
    )
    [decision] = log
    assert [cost.cached_tokens for cost in decision.costs] == [5]


def test_a_policy_that_compares_no_costs_has_none() -> None:
    log = DecisionLog()
    decide(log, policy=RoundRobin())
    [decision] = log
    assert (decision.costs, decision.cost_seconds) == ((), None)


def test_the_newest_comes_first_and_the_oldest_goes() -> None:
    log = DecisionLog()
    for second in range(MAX_DECISIONS + 1):
        decide(log, now=float(second))
    assert [decision.number for decision in log] == list(range(MAX_DECISIONS + 1, 1, -1))


def test_of_a_busy_routers_decisions_some_are_kept() -> None:
    log = DecisionLog()
    for number in range(MAX_DECISIONS + 1000):
        decide(log, now=100.0 + number / 1000)  # a thousand a second
    last_numbers = [decision.number for decision in log if decision.made_at > 101.0]
    assert len(last_numbers) == pytest.approx(KEPT_A_SECOND * 0.2, abs=1)


def test_a_pair_is_shown_with_what_every_other_would_have_cost() -> None:
    log = DecisionLog()
    decode = an_endpoint("d", role=Role.DECODE, prefill_tokens=8000)
    prefill = an_endpoint("p", role=Role.PREFILL)
    picker = Picker(FinishTime(), partial(log.add, "llama"), Pairing())
    picker.pick(a_request(500, can_transfer_kv=True), [decode], {"p": 400}, 0.0, prefills=[prefill])
    [decision] = log
    assert (decision.url, decision.prefill_url, decision.local_prefill, decision.cached_tokens) == ("d", "p", None, 400)
    assert [(cost.prefill_url, cost.cached_tokens) for cost in decision.costs] == [(None, 0), ("p", 400)]
    picker.pick(a_request(500, can_transfer_kv=True), [decode], {"d": 490}, 0.0, prefills=[])
    assert next(iter(log)).local_prefill == "no_prefill_endpoint"


def test_who_is_asked_for_a_prefix_is_shown() -> None:
    log = DecisionLog()
    picker = Picker(FinishTime(), partial(log.add, "llama"), fetching=PrefixFetching())
    busy, idle = an_exchanging("a", prefill_tokens=8000), an_exchanging("b")
    for cached in ({"a": 400}, {}):
        picker.pick(a_request(500, can_transfer_kv=True), [busy, idle], cached, 0.0, written=lambda: {"a": Held(400)})
    nothing, fetched = log
    assert (fetched.url, fetched.fetch_url, nothing.fetch_url) == ("b", "a", None)
    [chosen] = [sum(cost.terms_seconds.values()) for cost in fetched.costs if cost.url == "b"]
    assert fetched.cost_seconds == pytest.approx(chosen)
