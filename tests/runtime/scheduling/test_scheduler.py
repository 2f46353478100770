import itertools
import random

import pytest
from tests.runtime.scheduling.fake_rank import candidates_after, continuation

from kvasir_runtime.kv_cache.blocks import hash_blocks
from kvasir_runtime.kv_cache.spec import KvGroup, Reach
from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.scheduling.beam_search import BeamSearchState

FULL = (KvGroup((0,)),)
WINDOWS = (KvGroup((0,)), KvGroup((1,), Reach.window(6)), KvGroup((2,), Reach.window(6)))


def chunks(plan):
    return list(zip(plan.starts.tolist(), plan.num_new_tokens.tolist(), strict=True))


def test_prefills_then_decodes_one_token_a_step(make_engine):
    engine = make_engine()
    engine.add([1, 2, 3, 4, 5], max_tokens=3)
    assert [chunks(engine.step()) for _ in range(3)] == [[(0, 5)], [(5, 1)], [(6, 1)]]
    assert engine.step() is None


def test_sequences_share_one_token_budget_decodes_first(make_engine):
    engine = make_engine(budget=8)
    engine.add([1] * 4)
    engine.step()
    engine.add([2] * 20)
    plan = engine.step()
    assert plan.num_new_tokens.tolist() == [1, 7]
    assert plan.samples.tolist() == [True, False]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_long_prompt_of_any_rank_takes_no_token_from_a_running_stream(make_engine, policy):
    engine = make_engine(budget=4, policy=policy)
    streams = [engine.add([token] * 3, max_tokens=20) for token in (1, 2)]
    while len(engine.tokens) < 2:
        engine.step()
    before = {stream: len(engine.tokens[stream]) for stream in streams}
    engine.add([3] * 40, arrival=-1.0, priority=-9, so_far={0: continuation([3] * 40, 2)}, tenant="other")
    for _ in range(5):
        engine.step()
    assert {stream: len(engine.tokens[stream]) - before[stream] for stream in streams} == dict.fromkeys(streams, 5)


def test_without_chunking_a_prompt_waits_for_a_step_that_it_fits_in(make_engine):
    engine = make_engine(budget=8, chunked=False)
    engine.add([1] * 6)
    engine.add([2] * 6)
    assert [len(engine.step().rows) for _ in range(2)] == [1, 2]


def test_no_more_sequences_than_allowed_run_at_once(make_engine):
    engine = make_engine(max_num_seqs=2)
    for token in range(3):
        engine.add([token], max_tokens=2)
    assert len(engine.step().rows) == 2
    assert engine.scheduler.stats(0, 0.0).num_waiting == 1


def test_an_equal_prefix_is_computed_once_even_within_a_step(make_engine):
    engine = make_engine()
    engine.add([7] * 10)
    engine.add([7] * 10)
    plan = engine.step()
    assert plan.num_new_tokens.tolist() == [10, 2]
    assert (engine.kv.num_queries, engine.kv.num_hits) == (20, 8)


def test_another_salt_shares_nothing(make_engine):
    engine = make_engine()
    engine.add([7] * 10, salt="a")
    engine.add([7] * 10, salt="b")
    assert engine.step().num_new_tokens.tolist() == [10, 10]


def test_the_rank_is_told_the_salt(make_engine):
    engine = make_engine()
    engine.add([7] * 10, salt="a")
    engine.add([7] * 10)
    assert [new.spec.extra_keys for new in engine.step().added] == [(b"a",), ()]


def test_the_salt_is_in_the_first_block_alone_and_reaches_the_others_through_it(make_engine):
    engine = make_engine()
    engine.add([7] * 12, salt="a", max_tokens=1)
    engine.run()
    _, second = hash_blocks(None, [7] * 8, 4, (b"a",))
    assert engine.kv.pool.find((0, second)) is not None


def test_a_block_is_found_as_soon_as_its_last_token_is_written(make_engine):
    engine = make_engine()
    engine.add([7] * 3, max_tokens=5)
    content = 0, *hash_blocks(None, [7, 7, 7, *continuation([7] * 3, 1)], 4)
    engine.step()
    assert engine.kv.pool.find(content) is None, "the token is known but not written"
    engine.step()
    assert engine.kv.pool.find(content) is not None


def test_cached_tokens_are_reported_with_the_output(make_engine):
    engine = make_engine()
    engine.add([7] * 10, max_tokens=1)
    engine.run()
    again = engine.add([7] * 10, max_tokens=1)
    engine.run()
    assert engine.outputs[again][0].num_cached_tokens == 8


def test_prompt_logprobs_need_every_position_so_the_cache_is_not_used(make_engine):
    engine = make_engine()
    engine.add([7] * 10, max_tokens=1)
    engine.run()
    engine.add([7] * 10, max_tokens=1, prompt_logprobs=0)
    assert engine.step().num_new_tokens.tolist() == [10]


def test_prompt_logprobs_are_sent_once_a_request(make_engine):
    engine = make_engine()
    scored = engine.add([7] * 10, max_tokens=2, n=3, so_far={0: [7]}, prompt_logprobs=0)
    engine.run()
    first_outputs = [engine.outputs[name][0] for name in (scored, f"{scored}.1", f"{scored}.2")]
    assert [output.prompt_logprobs is not None for output in first_outputs] == [False, True, False]


def test_prompt_logprobs_are_whole_where_the_sequence_that_computes_them_is_aborted(make_engine):
    engine = make_engine(ahead=2)
    scored = engine.add(list(range(1, 10)), max_tokens=2, n=2, prompt_logprobs=0)
    for _ in range(2):  # the second sequence forks from the first, whose step is under way
        engine.step()
    engine.scheduler.abort(scored, 0)
    engine.run()
    entries = engine.outputs[f"{scored}.1"][0].prompt_logprobs
    assert [entry and entry.logprobs[0] for entry in entries] == [None, *(-float(i) for i in range(8))]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_prompt_logprobs_are_whole_after_a_preemption_with_a_chunk_under_way(make_engine, ahead):
    engine = make_engine(num_blocks=10, budget=6, ahead=ahead)
    first = engine.add([1] * 6, max_tokens=20)
    for _ in range(2):
        engine.step()
    scored = engine.add([2] * 30, max_tokens=2, prompt_logprobs=0)
    tokens = engine.run()
    assert engine.scheduler.stats(0, 0.0).num_preemptions > 0
    assert tokens[first] == continuation([1] * 6, 20)
    entries = engine.outputs[scored][0].prompt_logprobs
    assert [None if entry is None else entry.logprobs[0] for entry in entries] == [
        None,
        *(-float(i) for i in range(29)),
    ]


def test_a_prompt_that_was_scored_whole_before_its_preemption_is_not_scored_again(make_engine):
    engine = make_engine(num_blocks=5)
    engine.add([1] * 8, max_tokens=7)
    engine.add([2] * 7, max_tokens=7, prompt_logprobs=0)
    added = []
    while engine.scheduler.has_work:
        plan = engine.step()
        added += plan.added if plan else ()
    assert [(new.token_ids[0], new.spec.sampling.prompt_logprobs) for new in added] == [(1, None), (2, 0), (2, None)]
    assert added[-1].num_computed_tokens == 4, "what is cached need not be computed for its scores"


def test_the_newest_sequence_is_preempted_when_blocks_run_out(make_engine):
    engine = make_engine(num_blocks=4, cache=False)
    first = engine.add([1] * 8, max_tokens=7)
    second = engine.add([2] * 7, max_tokens=7)
    admitted = order_of(engine, 3)
    assert engine.scheduler.stats(0, 0.0).num_preemptions == 1
    assert admitted == [1, 2, 2], "the second comes back, the first never left"
    assert engine.run() == {first: continuation([1] * 8, 7), second: continuation([2] * 7, 7)}


def test_nothing_is_admitted_in_a_step_that_preempted(make_engine):
    """Not even a sequence of a lower rank than the preempted one's, for which there are blocks and a row now."""
    engine = make_engine(num_blocks=6, cache=False, max_num_seqs=2, policy="priority")
    engine.add([1] * 8, max_tokens=12, priority=0)
    engine.add([2] * 11, max_tokens=5, priority=1)
    engine.step()
    engine.add([3], max_tokens=2, priority=0)
    while engine.scheduler.stats(0, 0.0).num_preemptions == 0:
        plan = engine.step()
    assert (plan.added, plan.num_new_tokens.tolist()) == ((), [1])
    assert [new.token_ids for new in engine.step().added] == [[3]]


def test_sequences_that_arrive_together_are_preempted_in_a_settled_order(make_engine):
    engine = make_engine(num_blocks=4, cache=False)
    engine.arrive_together = True
    expected = {engine.add([token] * 7, max_tokens=7): continuation([token] * 7, 7) for token in (1, 2)}
    assert engine.run() == expected
    assert engine.scheduler.stats(0, 0.0).num_preemptions > 0


def test_a_preempted_request_is_looked_up_in_the_cache_once(make_engine):
    engine = make_engine(num_blocks=4)
    engine.add([1] * 8, max_tokens=7)
    engine.add([2] * 7, max_tokens=7)
    engine.run()
    assert engine.scheduler.stats(0, 0.0).num_preemptions > 0
    assert engine.kv.num_queries == 15


def test_a_beam_search_that_begins_again_is_looked_up_in_the_cache_once(make_engine):
    engine = make_engine(num_blocks=8)
    engine.add([1] * 8, max_tokens=16)
    engine.add([2] * 6, max_tokens=8, beam=BeamSearch(width=2))
    engine.run()
    assert engine.scheduler.stats(0, 0.0).num_preemptions > 0
    assert engine.kv.num_queries == 14


def test_the_highest_priority_is_admitted_first(make_engine):
    engine = make_engine(max_num_seqs=1, policy="priority")
    engine.add([1], priority=5, request_id="late")
    engine.add([2], priority=-1, request_id="urgent")
    assert engine.step().added[0].token_ids == [2]


def order_of(engine, number):
    """First tokens of the prompts, in the order of their admission."""
    order = []
    while len(order) < number:
        plan = engine.step()
        order += [new.token_ids[0] for new in plan.added] if plan else []
    return order


def test_fair_shares_alternate_between_tenants(make_engine):
    engine = make_engine(max_num_seqs=1, policy="fair", cache=False)
    for index in range(4):
        engine.add([index] * 8, tenant="greedy", max_tokens=1)
    engine.add([9] * 8, tenant="modest", max_tokens=1)
    assert order_of(engine, 5).index(9) == 1


def test_a_tenant_cannot_save_up_service_by_being_idle(make_engine):
    engine = make_engine(max_num_seqs=1, policy="fair", cache=False)
    for index in range(6):
        engine.add([index] * 8, tenant="busy", max_tokens=1)
    for _ in range(3):
        engine.step()
    for index in range(3):
        engine.add([50 + index] * 8, tenant="back", max_tokens=1)
    assert sum(first >= 50 for first in order_of(engine, 4)) == 2, "turns alternate instead of three in a row"


def test_a_newcomer_does_not_starve_a_tenant_all_of_whose_work_is_running(make_engine):
    engine = make_engine(max_num_seqs=2, policy="fair", cache=False)
    engine.add([1] * 20, tenant="running", max_tokens=30)
    for _ in range(8):
        engine.step()
    for index in range(4):
        engine.add([50 + index] * 4, tenant="newcomer", max_tokens=1)
    engine.add([2] * 4, tenant="running", max_tokens=1)
    assert 2 in order_of(engine, 4), "the newcomer starts at the counter of those that run"


def test_past_service_of_a_tenant_counts_when_it_returns(make_engine):
    engine = make_engine(max_num_seqs=2, policy="fair", cache=False)
    engine.add([1] * 2, tenant="steady", max_tokens=30)
    heavy = engine.add([2] * 24, tenant="heavy", max_tokens=1)
    while heavy not in engine.tokens:
        engine.step()
    engine.add([4] * 2, tenant="heavy", max_tokens=1)
    engine.add([3] * 2, tenant="steady", max_tokens=1)
    assert order_of(engine, 2) == [3, 4]


def test_stop_token_ends_the_sequence_after_min_tokens(make_engine):
    engine = make_engine()
    expected = continuation([1, 2], 6)
    request = engine.add([1, 2], max_tokens=6, stop_token_ids=(expected[3], expected[1]), min_tokens=2)
    assert engine.run()[request] == expected[:4]
    last = engine.outputs[request][-1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", expected[3])


def test_a_stop_token_right_at_min_tokens_does_not_end_it(make_engine):
    engine = make_engine()
    expected = continuation([1, 2], 4)
    request = engine.add([1, 2], max_tokens=4, stop_token_ids=(expected[1],), min_tokens=2)
    assert engine.run()[request] == expected


def test_output_never_exceeds_the_context(make_engine):
    engine = make_engine(budget=64)
    request = engine.add([1] * 60, max_tokens=50)
    assert len(engine.run()[request]) == 4
    assert engine.outputs[request][-1].finish_reason == "length"


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_aborted_request_gives_its_blocks_back_and_harms_no_neighbour(make_engine, ahead):
    engine = make_engine(ahead=ahead)
    keep, drop = engine.add([1] * 6), engine.add([2] * 6)
    engine.step()
    engine.scheduler.abort(drop)
    engine.scheduler.abort("never seen")
    assert engine.run()[keep] == continuation([1] * 6, 8)
    assert engine.kv.pool.num_used == 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_waiting_request_can_be_aborted(make_engine, n):
    engine = make_engine(max_num_seqs=1)
    keep = engine.add([1] * 6)
    engine.step()
    drop = engine.add([2] * 6, n=n)
    assert engine.scheduler.stats(0, 0.0).num_waiting == n
    engine.scheduler.abort(drop)
    assert engine.scheduler.stats(0, 0.0).num_waiting == 0
    assert engine.run() == {keep: continuation([1] * 6, 8)}


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_failed_step_ends_its_own_requests_and_leaves_no_garbage_to_be_found(make_engine, ahead):
    engine = make_engine(ahead=ahead, max_num_seqs=2)
    lost = engine.add([1] * 9)
    waiting = engine.add([2] * 4)
    plan = engine.scheduler.schedule()
    engine.under_way.append((plan, None))
    engine.fail()
    assert (engine.outputs[lost][0].finish_reason, engine.outputs[lost][0].error) == ("error", "device fell over")
    assert engine.outputs[waiting][0].finish_reason == "error"
    retry = engine.add([1] * 9)
    assert engine.step().num_new_tokens.tolist() == [9], "nothing of what was never written is found"
    assert engine.run()[retry] == continuation([1] * 9, 8)


def test_steps_behind_a_failed_one_are_planned_again(make_engine):
    engine = make_engine(ahead=3, max_num_seqs=2)
    lost = engine.add([1] * 9, max_tokens=1)
    first = engine.scheduler.schedule()
    later = engine.add([1] * 9 + [5], max_tokens=4)
    second = engine.scheduler.schedule()
    assert second.num_new_tokens.tolist()[-1] == 2, "it builds on what the first step is to write"
    engine.under_way.extend([(first, None), (second, None)])
    engine.fail()
    assert engine.outputs[lost][0].finish_reason == "error"
    assert engine.run()[later] == continuation([1] * 9 + [5], 4)
    assert engine.kv.pool.num_used == 0


def test_a_request_tells_once_when_a_part_of_it_was_first_scheduled(make_engine):
    engine = make_engine(budget=8, max_num_seqs=2)
    first, second = engine.add([1] * 20, n=2, max_tokens=2), engine.add([2] * 4, max_tokens=2)
    for engine.now in range(1, 40):
        engine.step()
    told = {name: [output.admitted_at for output in outputs] for name, outputs in engine.outputs.items()}
    assert told[first] == [1, None]
    assert told[f"{first}.1"] == [None, None]
    assert told[second][0] > 1


def test_a_held_request_waits_outside_the_queue(make_engine):
    engine = make_engine()
    held = engine.add([1] * 4, max_tokens=2, is_held=True)
    other = engine.add([2] * 4, max_tokens=2)
    assert engine.run() == {other: continuation([2] * 4, 2)}
    assert engine.scheduler.stats(0, 0.0).num_held == 1
    engine.scheduler.release(held)
    assert engine.run()[held] == continuation([1] * 4, 2)
    assert engine.scheduler.stats(0, 0.0).num_held == 0


def test_a_held_request_can_be_aborted(make_engine):
    engine = make_engine()
    held = engine.add([1] * 4, is_held=True, n=2)
    engine.scheduler.abort(held)
    engine.scheduler.release(held)
    assert engine.run() == {}


@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 8, 9])
def test_sequences_of_a_request_share_the_prompts_blocks(make_engine, prompt_len):
    engine = make_engine(cache=False)
    prompt = list(range(prompt_len))
    request = engine.add(prompt, n=3, max_tokens=9)
    num_shared = (prompt_len - 1) // 4
    while len(engine.tokens) < 3:
        engine.step()
    own = -(-(prompt_len + 1 - 4 * num_shared) // 4)
    assert engine.kv.pool.num_used <= num_shared + 3 * own
    assert engine.run() == {name: continuation(prompt, 9) for name in (request, f"{request}.1", f"{request}.2")}
    assert engine.kv.pool.num_used == 0


def test_sequences_fork_from_a_prompt_that_was_cached_whole(make_engine):
    engine = make_engine()
    prompt = [7] * 9
    engine.add(prompt, max_tokens=1)
    engine.run()
    request = engine.add(prompt, n=2, max_tokens=4)
    assert engine.step().num_new_tokens.tolist() == [1, 1], "in the step that they are admitted to"
    tokens = engine.run()
    assert tokens[request] == tokens[f"{request}.1"] == continuation(prompt, 4)


def blocks_of_hypotheses(prompt: list[int], outputs: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """What each block holds that beams need: a full one a prefix, one that is being filled a beam's own tokens. The
    newest token of a beam is in none yet."""
    hypotheses = [(*prompt, *output) for output in outputs]
    num_full, num_in_next = divmod(len(hypotheses[0]) - 1, 4)
    full = {tokens[: 4 * (1 + index)] for tokens in hypotheses for index in range(num_full)}
    return full | set(hypotheses if num_in_next else ())


def test_beams_share_the_blocks_of_what_they_agree_on(make_engine):
    engine = make_engine(cache=False, max_num_seqs=4)
    prompt, width = [5] * 18, 3
    beam = BeamSearch(width=width)
    engine.add(prompt, beam=beam, n=1, max_tokens=24)
    alone, num_saved = BeamSearchState(beam, frozenset(), 0, 24), 0
    while engine.scheduler.has_work:
        engine.step()
        alone.advance([candidates_after([*prompt, *each.output_token_ids], width) for each in alone.beams])
        outputs = [each.output_token_ids for each in alone.beams]
        if engine.scheduler.has_work and len(outputs) == width:
            num_blocks = len(blocks_of_hypotheses(prompt, outputs))
            assert engine.kv.pool.num_used == num_blocks
            num_shared, num_each = 18 // 4, -(-(18 + len(outputs[0]) - 1) // 4)
            num_saved = max(num_saved, num_shared + width * (num_each - num_shared) - num_blocks)
    assert num_saved >= 4, "beams shared blocks that they had generated"
    assert engine.kv.pool.num_used == 0


def test_one_sequence_of_a_request_can_be_aborted_before_and_after_the_fork(make_engine):
    engine = make_engine(budget=4)
    request = engine.add([3] * 10, n=3, max_tokens=4)
    engine.step()
    engine.scheduler.abort(request, 0)
    while not engine.tokens:
        engine.step()
    engine.scheduler.abort(request, 1)
    assert engine.run()[f"{request}.2"] == continuation([3] * 10, 4)
    assert engine.kv.pool.num_used == 0


def test_more_sequences_than_rows_are_computed_in_turn(make_engine):
    engine = make_engine(max_num_seqs=2)
    request = engine.add([3] * 6, n=5, max_tokens=3)
    tokens = engine.run()
    assert set(tokens) == {request, *(f"{request}.{index}" for index in range(1, 5))}
    assert all(line == continuation([3] * 6, 3) for line in tokens.values())


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("wrong_drafts", [0, 1, 3])
def test_drafts_change_nothing_but_the_number_of_steps(make_engine, ahead, wrong_drafts):
    engine = make_engine(drafts=3, wrong_drafts=wrong_drafts, ahead=ahead)
    stop = continuation([1] * 5, 17)[16]
    first, second = engine.add([1] * 5, max_tokens=30, stop_token_ids=(stop,)), engine.add([2] * 7, max_tokens=21)
    num_steps = 0
    while engine.scheduler.has_work or engine.under_way:
        engine.step()
        num_steps += 1
    expected = continuation([1] * 5, 30)
    assert engine.tokens == {first: expected[: expected.index(stop) + 1], second: continuation([2] * 7, 21)}
    assert (num_steps < 20) == (wrong_drafts != 1)
    stats = engine.scheduler.stats(0, 0.0)
    assert stats.num_draft_tokens > stats.num_drafts > 0
    assert sum(stats.num_accepted_per_position) == stats.num_accepted_tokens
    assert (stats.num_accepted_tokens == 0) == (wrong_drafts == 1)
    assert engine.kv.pool.num_used == 0


def test_drafts_stop_short_of_the_last_token_allowed(make_engine):
    engine = make_engine(drafts=7)
    engine.add([1] * 5, max_tokens=4)
    plans = [engine.step() for _ in range(2)]
    assert plans[1].num_new_tokens.tolist() == [3], "three tokens are left: two drafts and one more"


def test_drafts_leave_prompts_that_wait_half_of_what_is_spare(make_engine):
    engine = make_engine(drafts=7, budget=9)
    engine.add([1] * 4, max_tokens=40)
    engine.step()
    assert engine.step().num_new_tokens.tolist() == [8], "nobody waits"
    engine.add([2] * 12)
    assert engine.step().num_new_tokens.tolist() == [5, 4]


def test_drafts_preempt_nobody(make_engine):
    engine = make_engine(num_blocks=4, cache=False, drafts=4)
    engine.add([1] * 7, max_tokens=2)
    engine.add([2] * 7, max_tokens=2)
    engine.run()
    assert engine.scheduler.stats(0, 0.0).num_preemptions == 0


@pytest.mark.parametrize("length", [6, 24, 25])
def test_blocks_behind_a_window_are_freed(make_engine, length):
    engine = make_engine(groups=WINDOWS, cache=False, budget=8)
    engine.add([1] * length, max_tokens=2)
    while not engine.tokens:
        engine.step()
    written = length
    seen = (written - 1) // 4 - max(0, written - 6 + 1) // 4 + 1
    assert engine.kv.pool.num_used <= -(-(written + 1) // 4) + 2 * (seen + 1)
    engine.run()
    assert engine.kv.pool.num_used == 0


def test_a_prefix_is_found_where_every_window_group_has_its_last_blocks(make_engine):
    engine = make_engine(groups=WINDOWS)
    prompt = list(range(40))
    engine.add(prompt, max_tokens=1)
    engine.run()
    again = engine.add([*prompt, 1], max_tokens=1)
    engine.run()
    assert engine.outputs[again][0].num_cached_tokens == 40
    assert engine.tokens[again] == continuation([*prompt, 1], 1)


def test_a_prefix_whose_window_blocks_are_gone_is_computed_again(make_engine):
    engine = make_engine(groups=WINDOWS, num_blocks=40)
    prompt = list(range(24))
    engine.add(prompt, max_tokens=1)
    engine.run()
    for block in engine.kv.pool.blocks:
        if block.content is not None and block.content[0] == 1:
            engine.kv.pool.forget(block)
    again = engine.add([*prompt, 1], max_tokens=1)
    engine.run()
    assert engine.outputs[again][0].num_cached_tokens == 0
    assert engine.tokens[again] == continuation([*prompt, 1], 1)


def test_an_impossible_beam_search_is_answered_at_once(make_engine):
    engine = make_engine(max_num_seqs=2)
    request = engine.add([1] * 3, beam=BeamSearch(width=3), n=2)
    assert engine.run() == {request: [], f"{request}.1": []}
    assert "width 3" in engine.outputs[request][0].error


def test_an_impossible_beam_search_that_is_held_does_not_let_the_loop_sleep(make_engine):
    engine = make_engine(max_num_seqs=2)
    engine.add([1] * 3, beam=BeamSearch(width=3), is_held=True)
    engine.scheduler.take_rejected()
    assert not engine.scheduler.has_work
    engine.add([2] * 3)
    assert engine.scheduler.has_work


def test_a_beam_search_that_outgrows_the_cache_is_answered(make_engine):
    engine = make_engine(num_blocks=5, cache=False)
    request = engine.add([1] * 3, beam=BeamSearch(width=4), max_tokens=16)
    engine.run()
    output = engine.outputs[request][0]
    assert output.is_too_large
    for part in ("the beam search of width 4", "a prompt of 3 tokens, with up to 16 more", "KV cache of 5 blocks of 4"):
        assert part in output.error
    assert engine.kv.pool.num_used == 0


def test_a_sequence_that_outgrows_the_cache_is_answered_and_later_ones_are_served(make_engine):
    """A server refuses to start with so few blocks."""
    engine = make_engine(num_blocks=3)
    outgrowing, later = engine.add([1] * 3, n=2, max_tokens=20), engine.add([2] * 3, max_tokens=5)
    engine.run()
    assert "outgrew the KV cache of 3 blocks" in engine.outputs[outgrowing][-1].error
    assert engine.outputs[f"{outgrowing}.1"][-1].finish_reason == "error"
    assert engine.tokens[later] == continuation([2] * 3, 5)
    assert engine.kv.pool.num_used == 0


@pytest.mark.parametrize(
    ("ahead", "cache", "chunked", "policy", "drafts", "groups"),
    itertools.product([0, 1, 3], [False, True], [False, True], ["fcfs", "fair"], [0, 3], [FULL, WINDOWS]),
)
def test_every_sequence_gets_its_tokens_whatever_the_pressure(
    make_engine, ahead, cache, chunked, policy, drafts, groups
):
    rng = random.Random(hash((ahead, cache, chunked, drafts)))
    engine = make_engine(
        num_blocks=17 + 7 * (len(groups) - 1), max_num_seqs=6, budget=12 if chunked else 64, chunked=chunked,
        cache=cache, policy=policy, ahead=ahead, drafts=drafts, wrong_drafts=3, groups=groups,
    )  # fmt: skip
    expected = {}
    for index in range(16):
        shared = [3] * rng.randrange(0, 12)
        prompt = shared + [rng.randrange(997) for _ in range(rng.randint(1, 20))]
        num_tokens = rng.randint(1, 24)
        n = rng.choice([1, 1, 1, 3])
        request_id = engine.add(prompt, max_tokens=num_tokens, tenant=str(index % 3), priority=index % 2, n=n)
        names = [request_id, *(f"{request_id}.{i}" for i in range(1, n))]
        expected |= dict.fromkeys(names, continuation(prompt, num_tokens))
    assert engine.run() == expected
    assert engine.scheduler.stats(0, 0.0).num_preemptions > 0
    assert engine.kv.pool.num_used == 0
