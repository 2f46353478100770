"""How a step's token budget, rows and blocks are shared out."""

import pytest
from tests.runtime.scheduling.conftest import FixedDepth
from tests.runtime.scheduling.fake_rank import continuation

from kvasir_runtime.kv_cache.spec import KvGroup, Reach


def decoding(make_engine, num_streams, **options):
    """An engine whose streams have their prompts computed."""
    engine = make_engine(**options)
    for index in range(num_streams):
        engine.add([index + 1] * 3, max_tokens=12)
    while len(engine.tokens) < num_streams:
        engine.step()
    return engine


def test_more_decodes_than_the_budget_take_turns_by_rank(make_engine):
    engine = make_engine(budget=3)
    for index in range(5):
        engine.add([index], max_tokens=9)
    for _ in range(60):
        plan = engine.step()
        if plan is None:
            break
        assert plan.num_tokens <= 3
    assert engine.tokens == {f"request-{i + 1}": continuation([i], 9) for i in range(5)}


def test_a_budget_smaller_than_the_number_of_decodes_goes_to_the_lowest_ranks(make_engine):
    """The sequences of a request are more than the budget once they have forked."""
    engine = make_engine(budget=2)
    engine.add([7] * 3, max_tokens=6, n=4)
    tokens = engine.tokens
    while len(tokens.get("request-1", [])) < 6:
        engine.step()
    assert {name: len(line) for name, line in tokens.items()} == {"request-1": 6, "request-1.1": 6}
    engine.run()
    assert {name: len(line) for name, line in tokens.items()} == {
        "request-1": 6, "request-1.1": 6, "request-1.2": 6, "request-1.3": 6
    }  # fmt: skip


@pytest.mark.parametrize(("priority", "preempted"), [(0, "stream"), (2, "prompt")])
def test_when_blocks_run_out_rank_decides_between_a_prompt_and_a_running_stream(make_engine, priority, preempted):
    """The prompt was admitted with blocks enough for all of it; the stream has grown since."""
    engine = make_engine(num_blocks=12, budget=4, policy="priority", cache=False)
    stream = engine.add([1] * 3, max_tokens=30, priority=1)
    engine.step()
    prompt = engine.add([2] * 40, max_tokens=3, priority=priority)
    admitted = []
    while engine.scheduler.has_work:
        plan = engine.step()
        admitted += ["stream" if new.token_ids[0] == 1 else "prompt" for new in plan.added] if plan else []
    assert admitted == ["prompt", preempted]
    assert engine.tokens == {stream: continuation([1] * 3, 30), prompt: continuation([2] * 40, 3)}


def urgent_prompt(make_engine, length, num_streams, **options):
    """An engine with streams before a prompt that has just been admitted, and one behind it; each has a block."""
    engine = make_engine(policy="priority", cache=False, **options)
    for index in range(num_streams):
        engine.add([index + 1] * 3, max_tokens=3, priority=0)
    engine.add([50] * 3, max_tokens=12, priority=2)
    engine.step()
    engine.add([60] * length, max_tokens=2, priority=1)
    return engine


def test_a_prompt_that_is_short_of_blocks_takes_those_there_are_and_preempts_nobody_in_vain(make_engine):
    """Its second chunk needs 7 blocks; 2 are free, and the stream behind it holds 2."""
    engine = urgent_prompt(make_engine, 60, 4, num_blocks=20, budget=34)
    assert [engine.step().num_new_tokens.tolist() for _ in range(2)] == [[1] * 5 + [29], [1] * 5 + [11]]
    engine.run()
    assert engine.scheduler.stats(0, 0.0).num_preemptions == 0


def test_what_landed_for_one_that_waits_is_given_up_before_a_running_prompt_takes_less(make_engine):
    engine = make_engine(num_blocks=12, budget=16)
    prompt, pulled = engine.add([1] * 40, max_tokens=2), list(range(24))
    engine.step()
    other = engine.pull(pulled, 5, max_tokens=2)
    assert engine.kv.pool.num_free == 3
    assert engine.step().num_new_tokens.tolist() == [16]
    assert engine.run() == {prompt: continuation([1] * 40, 2), other: continuation(pulled, 2)}


def test_a_prompt_waits_for_what_its_own_steps_leave_behind_a_window_before_it_preempts(make_engine):
    groups = (KvGroup((0,)), KvGroup((1,), Reach.window(6)))
    engine = urgent_prompt(make_engine, 50, 0, num_blocks=22, budget=9, ahead=1, groups=groups)
    assert engine.run() == {"request-1": continuation([50] * 3, 12), "request-2": continuation([60] * 50, 2)}
    assert engine.scheduler.stats(0, 0.0).num_preemptions == 0


@pytest.mark.parametrize(
    ("budget", "lengths"),
    [(32, [4, 4, 4]), (12, [4, 4, 4]), (11, [3, 3, 3]), (9, [3, 3, 3]), (8, [2, 2, 2]), (5, [1, 1, 1])],
)
def test_drafts_are_cut_alike_to_what_the_budget_leaves(make_engine, budget, lengths):
    engine = decoding(make_engine, 3, budget=budget, drafts=3, wrong_drafts=1)
    while len(plan := engine.step().num_new_tokens.tolist()) < 3:
        pass
    assert plan == lengths


def test_a_step_that_decodes_with_drafts_leaves_prompts_the_rest_of_the_budget(make_engine):
    engine = decoding(make_engine, 2, budget=16, drafts=3, wrong_drafts=1)
    engine.add([9] * 30)
    assert engine.step().num_new_tokens.tolist() == [4, 4, 8]


def test_a_budget_used_up_by_decodes_admits_nobody(make_engine):
    engine = decoding(make_engine, 3, budget=3, max_num_seqs=8)
    engine.add([9] * 2)
    plan = engine.step()
    assert (plan.num_new_tokens.tolist(), plan.added) == ([1, 1, 1], ())


def test_a_proposer_is_shown_the_chunks_of_a_prompt_before_anything_is_sampled(make_engine):
    engine = make_engine(budget=4, drafts=3)
    engine.add([1] * 6)
    assert [engine.step().num_proposals for _ in range(2)] == [3, 3]


class PaysTogether(FixedDepth):
    """No drafts for a request alone."""

    def depths(self, rows):
        return super().depths(rows) * (len(rows) > 1)


def test_prompts_beside_decodes_are_drafted_for_where_drafts_will_pay_once_they_decode_too(make_engine):
    engine = make_engine(budget=4, depth=PaysTogether(3))
    engine.add([1] * 3, max_tokens=12)
    assert engine.step().num_proposals == 0
    engine.add([2] * 6, max_tokens=12)
    plans = [engine.step() for _ in range(4)]
    assert [(plan.num_decodes, len(plan.rows), plan.num_proposals) for plan in plans] == [
        (1, 2, 3), (1, 2, 3), (2, 2, 3), (2, 2, 3)
    ]  # fmt: skip


def test_the_first_decode_has_the_drafts_that_its_prompts_last_step_proposed(make_engine):
    engine = make_engine(drafts=3)
    engine.add([1] * 6, max_tokens=12)
    assert [engine.step().num_new_tokens.tolist() for _ in range(2)] == [[6], [4]]


@pytest.mark.parametrize(("max_tokens", "length"), [(1, None), (2, 1), (3, 2), (5, 4), (6, 4)])
def test_no_more_drafts_than_can_still_be_sent(make_engine, max_tokens, length):
    engine = make_engine(drafts=3)
    engine.add([1] * 6, max_tokens=max_tokens)
    engine.step()
    plan = engine.step()
    assert (None if plan is None else plan.num_new_tokens.tolist()[0]) == length


def test_drafts_shrink_to_the_blocks_there_are_and_preempt_nobody(make_engine):
    """Two blocks each; a token and three drafts would need a third where the prompt fills all but one slot."""
    engine = make_engine(num_blocks=4, cache=False, drafts=3, wrong_drafts=1)
    for token in (1, 2):
        engine.add([token] * 6, max_tokens=2)
    engine.step()
    engine.scheduler.abort("request-2")
    engine.add([3] * 5, max_tokens=2)
    engine.run()
    assert engine.scheduler.stats(0, 0.0).num_preemptions == 0


def test_where_blocks_are_short_only_as_many_drafts_are_verified_as_fit(make_engine):
    engine = make_engine(num_blocks=3, cache=False, drafts=3, wrong_drafts=1)
    engine.add([1] * 6, max_tokens=6)
    engine.add([2] * 3, max_tokens=2)
    engine.step()
    assert engine.step().num_new_tokens.tolist() == [2, 1]


def test_a_sequence_is_admitted_only_with_pages_for_all_of_its_known_tokens(make_engine):
    for num_blocks, num_admitted in ((4, 1), (5, 2)):
        engine = make_engine(num_blocks=num_blocks, cache=False)
        engine.add([1] * 8)
        engine.add([2] * 12)
        assert len(engine.step().added) == num_admitted


def test_a_later_one_that_would_fit_does_not_overtake(make_engine):
    engine = make_engine(num_blocks=4, cache=False)
    engine.add([1] * 8)
    engine.add([2] * 12)
    engine.add([3])
    assert [new.token_ids[0] for new in engine.step().added] == [1]


@pytest.mark.parametrize(("length", "is_admitted"), [(8, True), (9, False)])
def test_without_chunking_a_prompt_of_exactly_the_budget_fits(make_engine, length, is_admitted):
    engine = make_engine(budget=8, chunked=False)
    engine.add([1] * length)
    assert (engine.step() is not None) == is_admitted


def test_prompts_under_way_come_before_those_that_wait(make_engine):
    engine = make_engine(budget=6)
    engine.add([1] * 10, max_tokens=1)
    engine.add([2] * 10, max_tokens=1)
    plans = [engine.step() for _ in range(3)]
    assert [plan.num_new_tokens.tolist() for plan in plans] == [[6], [4, 2], [6]]
    assert [plan.samples.tolist() for plan in plans] == [[False], [True, False], [False]]


def test_a_last_known_token_alone_is_computed_as_a_decode(make_engine):
    engine = make_engine(budget=5)
    engine.add([1] * 6, max_tokens=1)
    plans = [engine.step() for _ in range(2)]
    assert [(plan.num_decodes, plan.samples.tolist()) for plan in plans] == [(0, [False]), (1, [True])]


@pytest.mark.parametrize("ahead", [1, 3])
def test_steps_ahead_stop_at_the_last_token_allowed(make_engine, ahead):
    engine = make_engine(ahead=ahead)
    engine.add([1] * 3, max_tokens=2)
    plans = [engine.scheduler.schedule() for _ in range(4)]
    assert [plan is not None for plan in plans] == [True, True, False, False]


def test_a_window_sequence_longer_than_the_pool_runs(make_engine):
    engine = make_engine(num_blocks=5, groups=(KvGroup((0,), Reach.window(6)),), budget=8, cache=False)
    request = engine.add([1] * 40, max_tokens=20)
    assert engine.run()[request] == continuation([1] * 40, 20)
    assert engine.scheduler.stats(0, 0.0).num_preemptions == 0


def test_steps_ahead_begin_at_the_highest_possible_position_of_the_drafts_before(make_engine):
    engine = make_engine(drafts=3)
    engine.add([1] * 3, max_tokens=20)
    plans = [engine.scheduler.schedule() for _ in range(3)]
    assert [(plan.starts.tolist(), plan.num_new_tokens.tolist()) for plan in plans] == [
        ([0], [3]), ([3], [4]), ([7], [4])
    ]  # fmt: skip
