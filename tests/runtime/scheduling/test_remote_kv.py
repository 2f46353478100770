"""Blocks that other engines read and write beside the steps."""

import pytest
from tests.runtime.scheduling.conftest import BLOCK_SIZE, Engine
from tests.runtime.scheduling.fake_rank import continuation

from kvasir_runtime.kv_cache.spec import KvGroup, Reach
from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.scheduling.remote_kv import Arrival

PROMPT = list(range(18))  # 4 full blocks of 4, and 2 tokens


def expected(engine: Engine, prompt: list[int] = PROMPT) -> Arrival:
    """Of a request that is held."""
    request_id = engine.add(prompt, is_held=True)
    return engine.scheduler.remote.expect(request_id)


def make_room(engine: Engine, arrival: Arrival) -> bool:
    return engine.scheduler.remote.make_room(arrival, engine.scheduler.last_step_under_way)


def found(engine: Engine, prompt: list[int] = PROMPT) -> int:
    """Tokens of a prompt that a new request would find."""
    return engine.kv.match(prompt, engine.kv.empty()).num_tokens


def test_an_arrival_takes_pages_for_what_is_not_cached(make_engine) -> None:
    engine = make_engine()
    engine.add(PROMPT[:9], max_tokens=1)
    engine.run()
    arrival = expected(engine)
    assert make_room(engine, arrival)
    assert (arrival.first, sorted(arrival.pages), engine.kv.pool.num_used) == (2, [2, 3], 4)
    assert found(engine) == 2 * BLOCK_SIZE, "nothing has arrived"


def test_what_has_arrived_can_be_found_and_is_held_until_it_is_used(make_engine) -> None:
    engine = make_engine()
    arrival = expected(engine)
    make_room(engine, arrival)
    engine.scheduler.remote.settle(arrival.request_id, 3)
    assert (found(engine), engine.kv.pool.num_used) == (3 * BLOCK_SIZE, 3)
    engine.scheduler.abort(arrival.request_id)
    assert (found(engine), engine.kv.pool.num_used) == (3 * BLOCK_SIZE, 0)


def test_an_arrival_waits_for_pages(make_engine) -> None:
    engine = make_engine(num_blocks=16, budget=64)
    engine.add(list(range(100, 152)), max_tokens=2)
    engine.step()
    arrival = expected(engine)
    assert not make_room(engine, arrival)
    assert not engine.scheduler.remote.holds_pages
    engine.run()
    assert make_room(engine, arrival)
    assert engine.scheduler.remote.holds_pages


def test_a_prefix_evicted_before_there_were_pages_has_not_arrived(make_engine) -> None:
    """Nobody was asked for it: it was here when the others were."""
    engine = make_engine(num_blocks=16)
    engine.add(PROMPT[:9], max_tokens=1)
    engine.run()
    arrival = expected(engine)
    engine.add(list(range(100, 156)), max_tokens=8)
    engine.run()
    assert make_room(engine, arrival)
    engine.scheduler.remote.settle(arrival.request_id, 4)
    assert found(engine) == 0


def test_a_prefix_whose_step_failed_has_not_arrived(make_engine) -> None:
    engine = make_engine(ahead=2)
    engine.add(PROMPT[:9], max_tokens=4)
    engine.step()
    arrival = expected(engine)
    assert (make_room(engine, arrival), arrival.first) == (True, 2)
    engine.fail()
    engine.scheduler.remote.settle(arrival.request_id, 4)
    assert found(engine) == 0


def test_a_prefix_whose_step_failed_has_not_arrived_while_another_step_writes_it(make_engine) -> None:
    engine = make_engine(ahead=2)
    engine.add(PROMPT[:9], max_tokens=4)
    engine.step()
    arrival = expected(engine)
    assert make_room(engine, arrival)
    engine.fail()
    engine.add(PROMPT[:9], max_tokens=4)
    engine.step()
    engine.scheduler.remote.settle(arrival.request_id, 4)
    assert engine.event_log.take() == []
    assert found(engine) == 2 * BLOCK_SIZE


def test_what_has_arrived_is_told_in_its_order_while_a_step_under_way_writes_the_same_beginning(make_engine) -> None:
    """A reader of events makes nothing of a block behind one that it has not heard of."""
    engine = make_engine(ahead=1)
    arrival = expected(engine)
    assert make_room(engine, arrival)
    engine.add(PROMPT[:9], max_tokens=1)
    engine.step()
    engine.scheduler.remote.settle(arrival.request_id, 4)
    (stored,) = engine.event_log.take()
    assert (stored.parent_block_hash, stored.block_hashes) == (None, arrival.hashes)
    engine.run()
    assert engine.event_log.take() == []
    assert found(engine) == 4 * BLOCK_SIZE


def test_of_an_arrival_only_what_was_not_here_is_told(make_engine) -> None:
    engine = make_engine()
    engine.add(PROMPT[:9], max_tokens=1)
    engine.run()
    arrival = expected(engine)
    assert make_room(engine, arrival)
    engine.event_log.take()
    engine.scheduler.remote.settle(arrival.request_id, 4)
    (stored,) = engine.event_log.take()
    assert (stored.parent_block_hash, stored.block_hashes) == (arrival.hashes[1], arrival.hashes[2:])


def test_pages_are_written_only_after_the_steps_that_may_touch_them(make_engine) -> None:
    engine = make_engine(ahead=2, num_blocks=16, budget=64)
    gone = engine.add(list(range(100, 156)), max_tokens=8)
    engine.step()
    engine.scheduler.abort(gone)  # its pages are free, and a step under way writes them
    arrival = expected(engine)
    assert make_room(engine, arrival)
    assert not engine.scheduler.has_ended(arrival.after_step)
    engine.step()
    assert engine.scheduler.has_ended(arrival.after_step)


def test_nothing_is_copied_any_more_into_pages_that_were_pulled_into(make_engine) -> None:
    """Of a search that left when its beams had forked and no step had been planned since: it was to copy to two blocks,
    and all but one are pulled into."""
    engine = make_engine(num_blocks=7)
    search = engine.add([5] * 18, beam=BeamSearch(width=3), max_tokens=10)
    engine.step()
    assert engine.kv.pool.num_free == 0
    engine.scheduler.abort(search)
    prompt = list(range(28))
    request = engine.pull(prompt, 6, max_tokens=1)
    assert engine.run()[request] == continuation(prompt, 1)


def test_a_prompt_that_must_be_scored_is_computed_here(make_engine) -> None:
    engine = make_engine()
    request_id = engine.add(PROMPT, is_held=True, prompt_logprobs=0)
    assert not engine.scheduler.remote.expect(request_id).is_missing_some


def test_an_offer_grows_as_chunks_are_written(make_engine) -> None:
    engine = make_engine(budget=6)
    request_id = engine.add(PROMPT, max_tokens=1)
    remote = engine.scheduler.remote
    remote.offer(request_id, len(PROMPT))
    grown = []
    while engine.scheduler.has_work:
        engine.step()
        grown += [(len(news.blocks), news.is_complete) for news in remote.take_news()]
    assert grown == [(1, False), (2, False), (1, True)]
    assert (remote.num_leased_blocks, engine.kv.pool.num_used) == (4, 4)
    remote.end_offer(request_id)
    assert engine.kv.pool.num_used == 0


def test_a_planned_chunk_is_not_offered_before_it_is_written(make_engine) -> None:
    engine = make_engine(ahead=2)
    request_id = engine.add(PROMPT, max_tokens=4)
    engine.scheduler.remote.offer(request_id, len(PROMPT))
    engine.step()
    assert engine.scheduler.remote.take_news() == []
    engine.run()
    (news,) = engine.scheduler.remote.take_news()
    assert (len(news.blocks), news.is_complete) == (4, True)


def test_an_offer_whose_request_ends_early_has_failed_and_holds_nothing(make_engine) -> None:
    engine = make_engine(budget=6)
    request_id = engine.add(PROMPT, max_tokens=1)
    remote = engine.scheduler.remote
    remote.offer(request_id, len(PROMPT))
    engine.step()
    engine.scheduler.abort(request_id)
    (news,) = remote.take_news()
    assert news.has_failed
    assert (remote.num_leased_blocks, engine.kv.pool.num_used) == (0, 0)


@pytest.mark.parametrize(("num_tokens", "is_given_up"), [(14, False), (20, True)])
def test_an_offer_of_a_preempted_prompt_is_given_up_only_where_its_pages_are_needed(
    make_engine, num_tokens, is_given_up
) -> None:
    """Two streams grow while the prompt behind them is written."""
    engine = make_engine(num_blocks=12, budget=4)
    for token in (1, 2):
        engine.add([token] * 3, max_tokens=num_tokens)
        engine.step()
    prompt, remote = list(range(100, 133)), engine.scheduler.remote
    offered = engine.add(prompt, max_tokens=1)
    remote.offer(offered, len(prompt))
    while engine.scheduler.has_work:
        assert engine.step() is not None, "a core that plans nothing sleeps while pages are held"
    assert engine.scheduler.stats(0, 0.0).num_preemptions == 1
    assert engine.tokens[offered] == continuation(prompt, 1)
    assert [news.has_failed for news in remote.take_news()] == [is_given_up]
    assert remote.num_leased_blocks == (0 if is_given_up else 8)


def test_an_incomplete_offer_is_given_up_for_its_own_request(make_engine) -> None:
    """Its window's blocks are gone, without which the others that are kept of it cannot be found."""
    groups = (KvGroup((0,)), KvGroup((1,), Reach.window(6)))
    engine = make_engine(num_blocks=21, budget=8, groups=groups)
    engine.add([1] * 3, max_tokens=17)
    engine.step()
    prompt = list(range(100, 153))
    offered = engine.add(prompt, max_tokens=1)
    engine.scheduler.remote.offer(offered, len(prompt))
    assert engine.run()[offered] == continuation(prompt, 1)
    assert engine.scheduler.stats(0, 0.0).num_preemptions


def test_what_is_cached_is_offered_as_far_as_it_is_written(make_engine) -> None:
    engine = make_engine(ahead=2, budget=8)
    engine.add(PROMPT, max_tokens=4)
    engine.step()
    hashes = engine.kv.hashes_to_look_up(PROMPT, engine.kv.empty())
    remote = engine.scheduler.remote
    remote.offer_cached("early", hashes)
    engine.run()
    remote.offer_cached("late", [*hashes, b"unknown"])
    assert [len(news.blocks) for news in remote.take_news()] == [0, 4]


def test_of_a_window_what_is_seen_is_offered_and_one_block_before_as_far_as_there_is(make_engine) -> None:
    engine = make_engine(groups=(KvGroup((0,)), KvGroup((1,), Reach.window(6))))
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    hashes = engine.kv.hashes_to_look_up(PROMPT, engine.kv.empty())
    engine.kv.pool.forget(engine.kv.pool.find((1, hashes[0])))
    remote = engine.scheduler.remote
    for offer, forgotten in (("all", None), ("fewer before", 1), ("fewer seen", 2)):
        if forgotten is not None:
            engine.kv.pool.forget(engine.kv.pool.find((1, hashes[forgotten])))
        remote.offer_cached(offer, hashes)
    is_there = [[block.block_ids[1] is not None for block in news.blocks] for news in remote.take_news()]
    assert is_there == [[False, True, True, True], [False, False, True, True], []]
    assert remote.num_leased_blocks == 7 + 6


def test_what_is_offered_again_under_an_id_is_held_once(make_engine) -> None:
    engine = make_engine()
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    hashes = engine.kv.hashes_to_look_up(PROMPT, engine.kv.empty())
    remote = engine.scheduler.remote
    for _ in range(2):
        remote.offer_cached("same", hashes)
    assert (remote.num_leased_blocks, engine.kv.pool.num_used) == (4, 4)
    remote.end_offer("same")
    assert engine.kv.pool.num_used == 0
