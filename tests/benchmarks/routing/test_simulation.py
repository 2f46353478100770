from statistics import mean

import pytest
from benchmarks.routing.lineup import LINEUP
from benchmarks.routing.simulation import Outcome, Setting, simulate
from benchmarks.routing.synthetic import agents, chats
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
