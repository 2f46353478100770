"""Pairing by cost is no worse than always prefilling locally or always elsewhere, whichever is better at the time."""

from dataclasses import replace

import pytest
from benchmarks.pairing import MIN_TOKENS, Exchanging, Outcome, Setting, simulate
from benchmarks.routing.synthetic import chats, documents
from benchmarks.routing.trace import Trace

CHATS = Trace("chats", 64, chats(1).requests[:800])
DOCUMENTS = Trace("documents", 64, documents(1).requests[:400])


def outcomes(trace: Trace, setting: Setting) -> dict[str, Outcome]:
    return {name: simulate(trace, setting, min_tokens) for name, min_tokens in MIN_TOKENS.items()}


@pytest.mark.parametrize(
    ("trace", "setting"),
    [
        (CHATS, Setting(1, 3, speed=1.0)),
        (DOCUMENTS, Setting(2, 2, speed=0.5)),
        (DOCUMENTS, Setting(2, 2, speed=1.5)),
        (DOCUMENTS, Setting(1, 3, speed=1.0)),
        (DOCUMENTS, Setting(2, 2, speed=1.0, tokens_per_second=4_000.0)),
    ],
    ids=["chats", "quiet", "busy", "few prefill engines", "slow transfers"],
)
def test_pairing_by_cost_is_no_worse_than_the_better_of_always_and_never(trace: Trace, setting: Setting) -> None:
    found = outcomes(trace, setting)
    assert (found["local"].remote_share, found["remote"].remote_share) == (0.0, 1.0)
    assert found["auto"].mean <= 1.05 * min(found["local"].mean, found["remote"].mean)


def test_it_is_repeatable() -> None:
    setting = Setting(1, 2)
    short = replace(CHATS, requests=CHATS.requests[:100])
    assert simulate(short, setting, None) == simulate(short, setting, None)


def test_who_always_prefills_elsewhere_gains_by_what_decode_engines_have_cached() -> None:
    trace, setting = Trace("chats", 64, chats(1).requests[:3000]), Setting(1, 3)
    fleets: tuple[Exchanging, ...] = ("nobody", "prefills", "all")
    nobody, prefills, everybody = (simulate(trace, replace(setting, exchanging=fleet), 0) for fleet in fleets)
    assert (nobody.fetched_share, prefills) == (0.0, nobody), "there is one prefill engine"
    assert everybody.fetched_share > 0.02
    assert everybody.mean < 0.9 * nobody.mean
