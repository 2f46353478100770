"""How many tokens the engine still has to compute, for those that wait and those that run; blocks hold 4 tokens."""

PROMPT = list(range(1, 13))


def waiting(engine) -> int:
    return engine.scheduler.stats(0, 0.0).waiting_uncached_tokens


def running(engine) -> int:
    return engine.scheduler.stats(0, 0.0).running_uncached_tokens


def test_prompts_that_wait_are_to_be_computed_until_they_run(make_engine):
    engine = make_engine()
    engine.add(PROMPT)
    engine.add([50, *PROMPT])
    assert (waiting(engine), running(engine)) == (25, 0)
    engine.step()
    assert (waiting(engine), running(engine)) == (0, 0)


def test_what_is_cached_is_not_to_be_computed(make_engine):
    engine = make_engine()
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    engine.add([*PROMPT[:8], 50, 51])
    assert waiting(engine) == 2


def test_each_block_is_looked_for_once(make_engine, monkeypatch):
    engine = make_engine()
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    looked_for, find = [], engine.kv.pool.find
    monkeypatch.setattr(engine.kv.pool, "find", lambda content: looked_for.append(content) or find(content))
    engine.add([*PROMPT, 50])
    assert (waiting(engine), len(looked_for)) == (1, 3)


def test_without_a_prefix_cache_everything_is(make_engine):
    engine = make_engine(cache=False)
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    engine.add(PROMPT)
    engine.add(PROMPT)
    assert waiting(engine) == 24


def test_a_beginning_that_several_wait_for_counts_once(make_engine):
    engine = make_engine()
    for last in (50, 60, 70):
        engine.add([*PROMPT, last])
    assert waiting(engine) == 13 + 1 + 1


def test_one_that_is_aborted_takes_its_tokens_along(make_engine):
    engine = make_engine()
    first = engine.add(PROMPT)
    engine.add([50, *PROMPT])
    engine.scheduler.abort(first)
    assert waiting(engine) == 13
    engine.add(PROMPT)
    assert waiting(engine) == 25


def test_scores_of_a_prompt_are_computed_cached_or_not(make_engine):
    engine = make_engine()
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    engine.add(PROMPT, prompt_logprobs=0)
    assert waiting(engine) == 12


def test_the_rest_of_a_prompt_under_way_is_counted_as_running(make_engine):
    engine = make_engine(budget=5)
    engine.add(PROMPT)
    engine.step()
    assert (waiting(engine), running(engine)) == (0, 7)
    engine.step()
    assert running(engine) == 2
    engine.step()
    assert running(engine) == 0


def test_so_are_chunks_that_the_device_has_yet_to_compute(make_engine):
    engine = make_engine(budget=5, ahead=2)
    engine.add(PROMPT)
    engine.step()
    engine.step()
    assert running(engine) == 12


def test_sequences_of_one_prompt_compute_it_once_and_each_its_last_token(make_engine):
    engine = make_engine(budget=4)
    engine.add(PROMPT, n=3)
    assert waiting(engine) == 12
    engine.step()
    assert running(engine) == 7


def test_a_preempted_sequence_waits_for_all_of_its_tokens_found_or_not(make_engine):
    """Its blocks are the next that others take."""
    engine = make_engine(num_blocks=6)
    _, preempted = (engine.add([first + index for index in range(8)], max_tokens=8) for first in (100, 200))
    while engine.scheduler.stats(0, 0.0).num_preemptions == 0:
        engine.step()
    assert waiting(engine) == 8 + len(engine.tokens[preempted])
    engine.run()
    assert waiting(engine) == 0


def test_tokens_in_use_are_those_that_the_blocks_have_room_for(make_engine):
    engine = make_engine(num_blocks=16)
    engine.add(PROMPT[:5], max_tokens=4)
    engine.step()
    stats = engine.scheduler.stats(0, 0.0)
    assert (stats.kv_used_tokens, stats.kv_capacity_tokens) == (8, 64)
