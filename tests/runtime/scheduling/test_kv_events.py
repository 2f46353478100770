"""Which events a step's blocks come to: written ones only, whatever was planned, shared, preempted or lost."""

import pytest
from tests.runtime.scheduling.fake_rank import continuation

from kvasir_runtime.kv_cache.blocks import hash_blocks
from kvasir_runtime.kv_cache.events import BlockRemoved, BlockStored
from kvasir_runtime.kv_cache.spec import KvGroup, Reach

PROMPT = list(range(1, 11))


def stored_tokens(engine) -> list[int]:
    """Of all that the last steps stored, in order."""
    return [token for event in engine.event_log.take() if isinstance(event, BlockStored) for token in event.token_ids]


def read(engine) -> set[bytes]:
    """Hashes of the blocks that are there, to whoever hears all events; they are those that can be found."""
    there: set[bytes] = set()
    for event in engine.event_log.take():
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or event.parent_block_hash in there, "stored behind one not there"
            assert there.isdisjoint(event.block_hashes)
            there.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert there.issuperset(event.block_hashes)
            there.difference_update(event.block_hashes)
    assert there == {block.content[1] for block in engine.kv.pool.blocks if block.content is not None}
    return there


def test_a_prompts_blocks_are_stored_when_its_step_has_ended(make_engine):
    engine = make_engine(ahead=1)
    engine.add(PROMPT)
    engine.step()
    assert engine.event_log.take() == []
    engine.step()
    assert stored_tokens(engine) == PROMPT[:8]


def test_a_chunk_is_stored_as_a_continuation_of_the_one_before(make_engine):
    engine = make_engine(budget=8)
    engine.add([*PROMPT, *PROMPT])
    engine.step()
    [first] = engine.event_log.take()
    engine.step()
    [second] = engine.event_log.take()
    assert second.parent_block_hash == first.block_hashes[-1]
    assert first.token_ids + second.token_ids == [*PROMPT, *PROMPT][:16]


def test_generated_tokens_are_stored_with_the_block_that_they_fill(make_engine):
    engine = make_engine()
    request = engine.add(PROMPT, max_tokens=4)
    engine.run()
    assert stored_tokens(engine) == [*PROMPT, *engine.tokens[request]][:12]


def test_a_streams_blocks_are_stored_in_their_order_while_a_prompt_of_the_same_tokens_is_under_way(make_engine):
    engine, prompt = make_engine(ahead=6), [*PROMPT, 11]
    engine.add(prompt, max_tokens=12)
    for _ in range(6):
        engine.step()
    engine.add([*prompt, *continuation(prompt, 2)], max_tokens=1)
    engine.run()
    assert len(read(engine)) == 5


def test_a_stream_stores_its_own_copy_of_a_prefix_that_was_lost(make_engine):
    """It computes the cached prompt again, and the blocks that were cached go to another request."""
    engine = make_engine(num_blocks=6)
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    stream = engine.add(PROMPT, max_tokens=4, prompt_logprobs=0)
    engine.step()
    engine.add([*range(50, 60)], max_tokens=1)
    while stream not in engine.outputs or engine.outputs[stream][-1].finish_reason is None:
        engine.step()
    assert {*hash_blocks(None, [*PROMPT, *engine.tokens[stream]][:12], 4)} <= read(engine)


@pytest.mark.parametrize("num_tokens", [10, 13])
def test_a_stream_stores_its_own_copy_of_a_prefix_that_was_lost_before_it_was_stored(make_engine, num_tokens):
    """Two requests compute the same blocks at once, and the one whose could be found is aborted. Of 13 tokens a block
    behind them is under way then."""
    engine, prompt = make_engine(num_blocks=9, ahead=2), [*range(1, 1 + num_tokens)]
    first = engine.add(prompt[:9])
    engine.step()
    stream = engine.add(prompt, max_tokens=8, prompt_logprobs=0)
    engine.step()
    engine.scheduler.abort(first)
    engine.add([*range(50, 69)], max_tokens=1)
    engine.run()
    assert {*hash_blocks(None, [*prompt, *engine.tokens[stream]][:16], 4)} <= read(engine)


def test_tokens_that_were_drafted_and_refused_are_never_stored(make_engine):
    engine = make_engine(drafts=3, wrong_drafts=2)
    request = engine.add(PROMPT, max_tokens=12)
    engine.run()
    assert stored_tokens(engine) == [*PROMPT, *engine.tokens[request]][:20]


def test_a_failed_step_and_those_behind_it_stored_nothing(make_engine):
    engine = make_engine(ahead=1, budget=8)
    engine.add([*PROMPT, *PROMPT])
    engine.step()
    engine.scheduler.schedule()
    engine.fail()
    assert engine.event_log.take() == []
    engine.add([*PROMPT, *PROMPT])
    engine.run()
    assert stored_tokens(engine)[:16] == [*PROMPT, *PROMPT][:16]


def test_what_was_written_before_a_step_failed_stays_stored(make_engine):
    engine = make_engine()
    engine.add(PROMPT)
    engine.step()
    engine.event_log.take()
    engine.add(PROMPT[::-1])
    plan = engine.scheduler.schedule()
    engine.under_way.append((plan, None))
    engine.fail()
    assert engine.event_log.take() == []
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    assert engine.event_log.take() == []


def test_forks_of_one_prompt_store_it_once(make_engine):
    engine = make_engine()
    engine.add(PROMPT, n=3, max_tokens=1)
    engine.run()
    assert stored_tokens(engine) == PROMPT[:8]


def test_a_second_request_stores_only_what_the_first_did_not(make_engine):
    engine = make_engine()
    engine.add(PROMPT, max_tokens=1)
    engine.add([*PROMPT[:8], 50, 51, 52, 53, 54], max_tokens=1)
    engine.run()
    assert stored_tokens(engine) == [*PROMPT[:8], 50, 51, 52, 53]


def test_blocks_that_a_preempted_sequence_lost_to_another_are_removed(make_engine):
    engine = make_engine(num_blocks=6)
    for first in (100, 200):
        engine.add([first + index for index in range(8)], max_tokens=8)
    engine.run()
    assert engine.scheduler.stats(0, 0.0).num_preemptions > 0
    assert read(engine)


def test_behind_a_window_the_full_groups_blocks_stay_stored(make_engine):
    engine = make_engine(groups=(KvGroup((0,)), KvGroup((1,), Reach.window(5))))
    request = engine.add(PROMPT, max_tokens=10)
    engine.run()
    assert stored_tokens(engine) == [*PROMPT, *engine.tokens[request]][:16]
