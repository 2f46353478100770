"""When the first in the queue, once refused for want of pages, is looked at again; blocks hold 4 tokens."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from tests.runtime.scheduling.conftest import Engine
from tests.runtime.scheduling.fake_rank import continuation

from kvasir_runtime.kv_cache.blocks import SequenceBlocks, Tokens
from kvasir_runtime.kv_cache.kv_cache import KvCache, Prefix
from kvasir_runtime.kv_cache.spec import KvGroup, Reach

PROMPT = list(range(100, 140))
FULL, WINDOW, LONG_WINDOW = KvGroup((0,)), KvGroup((1,), Reach.window(6)), KvGroup((2,), Reach.window(13))


class WatchedKvCache(KvCache):
    """Notes how many tokens each look found."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.matched: list[int] = []

    def match(self, token_ids: Tokens, blocks: SequenceBlocks) -> Prefix:
        prefix = super().match(token_ids, blocks)
        self.matched.append(prefix.num_tokens)
        return prefix


class TemptingKvCache(WatchedKvCache):
    """There always seems to be something to be found, so that every step looks."""

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        return super().num_cached(hashes) or 1


@pytest.fixture
def make_engine(make_engine) -> Any:
    return partial(make_engine, kv_cache=WatchedKvCache)


def test_a_request_that_waits_for_pages_is_matched_once_while_none_come_free(make_engine) -> None:
    """15 blocks, of which 10 are cached and free, in a pool of 16 of which a stream has 2 and takes more."""
    engine = make_engine(num_blocks=16)
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    stream = engine.add([1] * 5, max_tokens=27)
    engine.step()
    blocked = engine.add([*PROMPT, *range(200, 220)], max_tokens=4)
    del engine.kv.matched[:]
    while len(engine.tokens[stream]) < 27:
        assert engine.step().added == ()
    assert engine.kv.matched == [40]
    assert engine.run()[blocked] == continuation([*PROMPT, *range(200, 220)], 4)


def test_so_many_pages_as_it_lacked_make_it_looked_at_again(make_engine) -> None:
    """12 blocks: 3 are lacking for 8, as each stream holds 2 and will; those that end early free 2 each."""
    engine = make_engine(num_blocks=13, cache=False)
    for token, max_tokens in ((1, 2), (2, 3), (3, 4), (4, 20)):
        engine.add([token] * 5, max_tokens=max_tokens)
    engine.step()
    engine.add(PROMPT[:32], max_tokens=2)
    admitted = [len(engine.step().added) for _ in range(4)]
    assert (admitted, len(engine.kv.matched)) == ([0, 0, 1, 0], 4 + 2)


def test_another_that_comes_first_is_looked_at_at_once(make_engine) -> None:
    engine = make_engine(num_blocks=12, cache=False, policy="priority")
    engine.add([1] * 5, max_tokens=20)
    engine.step()
    engine.add([2] * 44, max_tokens=2, priority=1)
    assert engine.step().added == ()
    engine.add([3] * 5, max_tokens=2)
    assert [new.token_ids[0] for new in engine.step().added] == [3]
    assert len(engine.kv.matched) == 4, "and the one that was refused is looked at behind it"


def test_a_block_that_can_be_found_behind_its_cached_beginning_makes_it_looked_at_again(make_engine) -> None:
    """A stream with drafts has blocks that it fills later. Then one page less is needed, and none has come free."""
    engine = make_engine(num_blocks=7, drafts=3, wrong_drafts=1)
    engine.add([1] * 5, max_tokens=20)
    for _ in range(3):
        engine.step()
    known = [1] * 5 + continuation([1] * 5, 3)
    blocked = engine.add([*known, *range(200, 209)], max_tokens=1)
    assert engine.step().added == ()
    assert (engine.kv.matched[-1], engine.kv.pool.num_free) == (4, 3)
    assert [new.num_computed_tokens for new in engine.step().added] == [8]
    assert engine.tokens[blocked] == continuation([*known, *range(200, 209)], 1)


def test_what_has_landed_since_for_one_behind_it_makes_it_looked_at_again(make_engine) -> None:
    """It is given up for the one that comes first, as anything that has arrived."""
    engine = make_engine(num_blocks=12)
    engine.add([1] * 5, max_tokens=20)
    engine.add([2] * 5, max_tokens=2)
    engine.step()
    engine.add(PROMPT[:36], max_tokens=2)
    assert engine.step().added == (), "8 are free of the 9 that it needs"
    engine.pull(list(range(200, 224)), 5, max_tokens=2)
    assert engine.kv.pool.num_free == 5
    assert [new.token_ids for new in engine.step().added] == [PROMPT[:36]]


def test_what_has_landed_for_itself_is_found_by_one_look(make_engine) -> None:
    engine = make_engine(num_blocks=10)
    engine.add([1] * 5, max_tokens=3)
    engine.step()
    request = engine.pull(PROMPT[:36], 8, max_tokens=2)
    del engine.kv.matched[:]
    assert [engine.step().added for _ in range(2)] == [(), ()]
    assert engine.kv.matched == [32]
    assert engine.run()[request] == continuation(PROMPT[:36], 2)


def test_it_is_looked_at_whenever_nobody_runs(make_engine) -> None:
    """It needed 15 pages, 10 of them cached and free, which another engine now reads: there will be 6 free at most."""
    engine = make_engine(num_blocks=16)
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    engine.add([1] * 5, max_tokens=3)
    engine.step()
    prompt = [*PROMPT, *range(200, 217)]
    blocked = engine.add(prompt, max_tokens=3)
    assert engine.step().added == ()
    engine.scheduler.remote.offer_cached("read", engine.scheduler.hashes_of(blocked))
    assert engine.run()[blocked] == continuation(prompt, 3)


def run(engine: Engine, seed: int) -> list[object]:
    """Whatever comes and goes, what each turn computes."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(900) for _ in range(24)] for _ in range(3)]
    turns: list[object] = []
    to_come = 24
    while to_come or engine.scheduler.has_work or engine.under_way:
        if to_come and rng.random() < 0.4:
            to_come -= 1
            prompt = rng.choice(beginnings)[: rng.choice([6, 20])] + [to_come] * rng.choice([3, 8, 20])
            name, n = str(to_come), rng.choice([1, 1, 3])
            engine.add(
                prompt, request_id=name, max_tokens=rng.choice([2, 6, 13]), priority=to_come % 2, n=n, tenant=name
            )
        if rng.random() < 0.03:
            engine.scheduler.abort(str(rng.randrange(24)))
        plan = engine.step()
        turns.append(None if plan is None else (plan.rows.tolist(), plan.num_new_tokens.tolist()))
    return turns


@pytest.mark.parametrize(
    ("groups", "num_blocks"),
    [((FULL,), 22), ((FULL, WINDOW, LONG_WINDOW), 38), ((WINDOW,), 12)],
    ids=["full", "windows", "window alone"],
)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("seed", range(2))
def test_every_step_is_what_it_is_when_every_step_looks(make_engine, groups, num_blocks, policy, seed) -> None:
    options = {"num_blocks": num_blocks, "budget": 16, "policy": policy, "ahead": seed, "groups": groups}
    engine, looking = (make_engine(**options, kv_cache=kind) for kind in (WatchedKvCache, TemptingKvCache))
    assert run(engine, seed) == run(looking, seed)
    assert len(engine.kv.matched) < len(looking.kv.matched)
