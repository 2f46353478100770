from dataclasses import replace
from statistics import mean

import pytest
from benchmarks.routing.lineup import LINEUP
from benchmarks.routing.simulation import Outcome, Setting, simulate
from benchmarks.routing.synthetic import agents, chats, hot_document, slow_decoder
from benchmarks.routing.trace import Trace

TRACE = Trace("beginning", 64, chats(1).requests[:600])
LONGER_PROMPTS = [Trace("beginning", 64, agents(seed).requests[:800]) for seed in range(1, 7)]


def outcome(rule: str, num_routers: int = 1, trace: Trace = TRACE) -> Outcome:
    return simulate(trace, Setting(speed=2.0, num_replicas=4, num_routers=num_routers), LINEUP[rule])


@pytest.mark.parametrize("rule", LINEUP)
def test_every_rule_gets_every_request_to_its_first_token_and_is_repeatable(rule: str) -> None:
    first = outcome(rule, num_routers=2)
    assert 0 < first.mean <= first.p99
    assert 0 <= first.hit_rate < TRACE.hit_ceiling() + 1e-9
    assert first.balance >= 1.0
    assert outcome(rule, num_routers=2) == first


def test_four_routers_that_hear_engines_place_as_well_as_one() -> None:
    def mean_seconds(num_routers: int) -> float:
        return mean(outcome("kvasir, KV events", num_routers, trace).mean for trace in LONGER_PROMPTS)

    assert mean_seconds(4) < 1.05 * mean_seconds(1)


def test_an_outcome_tells_what_answers_take_and_who_gets_them() -> None:
    told = outcome("round robin")
    assert 0 < told.token_mean <= told.token_p99
    assert told.mean < told.end_mean <= told.end_p99
    assert told.requests_balance == pytest.approx(1.0, abs=0.05)


def test_a_hot_document_is_on_every_engine_soon() -> None:
    rules = "kvasir, KV events", "Dynamo linear"
    ours, spread = (simulate(hot_document(), Setting(2.0, 8, 1), LINEUP[rule]) for rule in rules)
    assert ours.requests_balance < 1.5
    assert ours.mean < 1.1 * spread.mean
    assert ours.end_mean < 1.1 * spread.end_mean


def test_an_engine_that_decodes_slower_gets_less() -> None:
    trace = slow_decoder()
    trace = replace(trace, requests=trace.requests[:2000])
    rules = "kvasir, KV events", "Dynamo linear"
    ours, blind = (simulate(trace, Setting(1.0, 8, 1), LINEUP[rule]) for rule in rules)
    assert ours.token_p99 < 0.5 * blind.token_p99
    assert ours.end_mean < blind.end_mean
