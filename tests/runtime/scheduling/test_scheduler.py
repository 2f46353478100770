import itertools
import random

import pytest


def continuation(prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append((sum(tokens) * 31 + len(tokens)) % 997)
    return tokens[len(prompt) :]


def test_prefills_then_decodes_one_token_a_step(make_engine):
    engine = make_engine()
    engine.add([1, 2, 3, 4, 5], max_tokens=3)
    shares = [engine.step()[0].requests[0] for _ in range(3)]
    assert [(share.num_computed_tokens, share.num_new_tokens) for share in shares] == [(0, 5), (5, 1), (6, 1)]
    assert engine.step()[0] is None


def test_requests_share_one_token_budget_running_ones_first(make_engine):
    engine = make_engine(budget=8)
    engine.add([1] * 4)
    engine.step()
    engine.add([2] * 20)
    batch, _ = engine.step()
    assert [share.num_new_tokens for share in batch.requests] == [1, 7]
    assert [share.samples for share in batch.requests] == [True, False]


def test_without_chunking_a_prompt_waits_for_a_step_that_it_fits_in(make_engine):
    engine = make_engine(budget=8, chunked=False)
    engine.add([1] * 6)
    engine.add([2] * 6)
    assert [len(engine.step()[0].requests) for _ in range(2)] == [1, 2]


def test_no_more_requests_than_allowed_run_at_once(make_engine):
    engine = make_engine(max_num_seqs=2)
    for token in range(3):
        engine.add([token], max_tokens=2)
    assert len(engine.step()[0].requests) == 2
    assert engine.scheduler.stats(0, 0.0).num_waiting == 1


def test_an_equal_prefix_is_computed_once_even_within_a_step(make_engine):
    engine = make_engine()
    engine.add([7] * 10)
    engine.add([7] * 10)
    batch, _ = engine.step()
    assert [share.num_new_tokens for share in batch.requests] == [10, 2]
    assert batch.requests[1].new_block_ids[:2] == batch.requests[0].new_block_ids[:2]
    assert (engine.prefix_cache.num_queries, engine.prefix_cache.num_hits) == (20, 8)


def test_cached_tokens_are_reported_with_the_output(make_engine):
    engine = make_engine()
    engine.add([7] * 10, max_tokens=1)
    engine.run()
    engine.add([7] * 10, max_tokens=1)
    assert engine.step()[1][0].output.num_cached_tokens == 8


def test_prompt_logprobs_need_every_position_so_the_cache_is_not_used(make_engine):
    engine = make_engine()
    engine.add([7] * 10, max_tokens=1)
    engine.run()
    engine.add([7] * 10, max_tokens=1, prompt_logprobs=0)
    assert engine.step()[0].requests[0].num_new_tokens == 10


def test_preempts_the_newest_request_when_blocks_run_out(make_engine):
    engine = make_engine(num_blocks=4, cache=False)
    first = engine.add([1] * 8, max_tokens=7)
    second = engine.add([2] * 7, max_tokens=7)
    outputs = engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert outputs == {first: continuation([1] * 8, 7), second: continuation([2] * 7, 7)}


def test_requests_that_arrive_together_are_preempted_in_a_settled_order(make_engine):
    engine = make_engine(num_blocks=4, cache=False)
    engine.arrive_together = True
    expected = {engine.add([token] * 7, max_tokens=7): continuation([token] * 7, 7) for token in (1, 2)}
    assert engine.run() == expected
    assert engine.scheduler.num_preemptions > 0


def test_the_lowest_priority_is_preempted_and_the_highest_admitted_first(make_engine):
    engine = make_engine(max_num_seqs=1, policy="priority")
    engine.add([1], priority=5, request_id="late")
    engine.add([2], priority=-1, request_id="urgent")
    assert engine.step()[0].requests[0].request_id == "urgent"


def test_fair_shares_alternate_between_tenants(make_engine):
    engine = make_engine(max_num_seqs=1, policy="fair", cache=False)
    for index in range(4):
        engine.add([index] * 8, tenant="greedy", max_tokens=1, request_id=f"greedy-{index}")
    engine.add([9] * 8, tenant="modest", max_tokens=1, request_id="modest")
    order = [engine.step()[0].requests[0].request_id for _ in range(5)]
    assert order.index("modest") == 1


def test_a_tenant_cannot_save_up_service_by_being_idle(make_engine):
    engine = make_engine(max_num_seqs=1, policy="fair", cache=False)
    for index in range(6):
        engine.add([index] * 8, tenant="busy", max_tokens=1)
    for _ in range(3):
        engine.step()
    for index in range(3):
        engine.add([50 + index] * 8, tenant="back", max_tokens=1, request_id=f"back-{index}")
    order = [engine.step()[0].requests[0].request_id.startswith("back") for _ in range(4)]
    assert sum(order) == 2, "turns alternate instead of the newcomer going three times in a row"


def test_stop_token_ends_the_request_after_min_tokens(make_engine):
    engine = make_engine()
    expected = continuation([1, 2], 6)
    engine.add([1, 2], max_tokens=6, stop_token_ids=(expected[3],), min_tokens=2)
    outputs = [addressed.output for _ in range(6) for addressed in engine.step()[1]]
    assert [output.new_token_ids[0] for output in outputs] == expected[:4]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", expected[3])


def test_output_never_exceeds_the_context(make_engine):
    engine = make_engine(budget=64)
    engine.add([1] * 60, max_tokens=50)
    outputs = [addressed.output for _ in range(8) for addressed in engine.step()[1]]
    assert len(outputs) == 4
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("ahead", [False, True])
def test_an_aborted_request_gives_its_blocks_back_and_harms_no_neighbour(make_engine, ahead):
    engine = make_engine(ahead=ahead)
    keep, drop = engine.add([1] * 6), engine.add([2] * 6)
    engine.step()
    engine.scheduler.abort(drop)
    engine.scheduler.abort("never seen")
    assert engine.run()[keep][-7:] == continuation([1] * 6, 8)[1:]
    assert engine.pool.num_used == 0


def test_a_failed_step_ends_its_own_requests_only(make_engine):
    engine = make_engine(max_num_seqs=1)
    engine.add([1] * 4)
    waiting = engine.add([2] * 4)
    batch = engine.scheduler.schedule()
    engine.rank.run(batch)
    (failed,) = engine.scheduler.fail(batch, "device fell over")
    assert (failed.output.finish_reason, failed.output.error) == ("error", "device fell over")
    assert engine.run()[waiting] == continuation([2] * 4, 8)


@pytest.mark.parametrize(
    ("ahead", "cache", "chunked", "policy"),
    itertools.product([False, True], [False, True], [False, True], ["fcfs", "priority", "fair"]),
)
def test_every_request_gets_its_tokens_whatever_the_pressure(make_engine, ahead, cache, chunked, policy):
    rng = random.Random(hash((ahead, cache, chunked)))
    engine = make_engine(
        num_blocks=17, max_num_seqs=6, budget=12 if chunked else 64, chunked=chunked, cache=cache, policy=policy,
        ahead=ahead,
    )  # fmt: skip
    expected = {}
    for index in range(40):
        shared = [3] * rng.randrange(0, 12)
        prompt = shared + [rng.randrange(997) for _ in range(rng.randint(1, 20))]
        num_tokens = rng.randint(1, 24)
        request_id = engine.add(prompt, max_tokens=num_tokens, tenant=str(index % 3), priority=index % 2)
        expected[request_id] = continuation(prompt, num_tokens)
    assert engine.run() == expected
    assert engine.scheduler.num_preemptions > 0
    engine.step()
    assert engine.pool.num_used == 0
