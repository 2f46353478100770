from math import inf

import pytest
from benchmarks.routing.engine import CacheUpdate, Engine, EngineModel
from benchmarks.routing.job import Job
from benchmarks.routing.trace import TraceRequest
from tests.router.parts import a_request

BLOCK = 16
MODEL = EngineModel(
    prefill_tokens_per_second=1000.0, context_doubling_tokens=inf, kv_capacity_tokens=64 * BLOCK, chunk_tokens=100,
    decode_step_seconds=0.01, decode_seconds_per_kv_token=0.0,
)  # fmt: skip


def an_engine(model: EngineModel = MODEL, updates: list[CacheUpdate] | None = None) -> Engine:
    return Engine(0, model, BLOCK, [] if updates is None else updates)


def job(number: int, blocks: range, num_output_tokens: int = 1) -> Job:
    traced = TraceRequest(0.0, len(blocks) * BLOCK, num_output_tokens, tuple(blocks))
    return Job(number, traced, 0.0, a_request(request_id=str(number)), router=0)


def run(engine: Engine, until: float = inf) -> list[tuple[int, float]]:
    """The first tokens up to then."""
    seen: list[tuple[int, float]] = []
    while (at := engine.next_event()) <= until and at < inf:
        engine.proceed(at)
        seen += [(job.number, job.first_token_at) for job in engine.first_tokens]
        engine.first_tokens.clear()
    return seen


def test_prompts_are_prefilled_one_after_another() -> None:
    engine = an_engine()
    engine.submit(job(1, range(10)), 0.0)
    engine.submit(job(2, range(10, 15)), 0.1)
    assert engine.queue_seconds(0.1) == pytest.approx(0.14)
    assert run(engine) == [(1, pytest.approx(0.16)), (2, pytest.approx(0.24))]


def test_a_token_behind_a_context_costs_more() -> None:
    model = EngineModel(prefill_tokens_per_second=1000.0, context_doubling_tokens=1000.0)
    assert model.prefill_seconds(1000, 0) == pytest.approx(1.5)
    assert model.prefill_seconds(1000, 0) + model.prefill_seconds(500, 1000) == pytest.approx(
        model.prefill_seconds(1500, 0)
    )


def test_a_cached_prefix_is_not_computed_again_but_the_last_token_is() -> None:
    engine = an_engine()
    engine.submit(job(1, range(10)), 0.0)
    run(engine)
    engine.submit(job(2, range(10)), 1.0)
    assert run(engine) == [(2, pytest.approx(1.016))]
    assert (engine.num_prompt_tokens, engine.num_cached_tokens) == (320, 144)


def test_a_prefix_that_is_being_computed_is_cached_for_those_behind() -> None:
    engine = an_engine()
    for number in (1, 2):
        engine.submit(job(number, range(10)), 0.0)
    assert run(engine)[1] == (2, pytest.approx(0.176))


def test_decodes_take_their_part_of_a_prefills_steps() -> None:
    slow = EngineModel(
        prefill_tokens_per_second=1000.0, context_doubling_tokens=inf, kv_capacity_tokens=10**6, chunk_tokens=100,
        decode_step_seconds=0.01, decode_seconds_per_kv_token=0.1 / 210,
    )  # fmt: skip
    engine = an_engine(slow)
    engine.submit(job(1, range(10), num_output_tokens=100), 0.0)
    run(engine, until=0.16)
    engine.submit(job(2, range(20, 30)), 0.16)
    assert engine.chunk_seconds == pytest.approx(0.2)
    assert run(engine, until=1.0) == [(2, pytest.approx(0.16 + 0.16 * 2))]  # each chunk's step reads 210 tokens of KV


def test_a_request_waits_while_kv_is_full() -> None:
    engine = an_engine()
    engine.submit(job(1, range(50), num_output_tokens=50), 0.0)
    engine.submit(job(2, range(100, 120)), 0.0)
    first, second = run(engine)
    assert first == (1, pytest.approx(0.8))
    assert second == (2, pytest.approx(0.8 + 49 * 0.01 + 0.32))


def test_the_least_recently_used_are_evicted_first_and_ends_before_beginnings() -> None:
    updates: list[CacheUpdate] = []
    engine = an_engine(updates=updates)
    for number, blocks in enumerate((range(30), range(100, 130), range(200, 210))):
        engine.submit(job(number, blocks), float(number))
        run(engine)
    assert updates[-2] == CacheUpdate(2.0, 0, (), tuple(range(29, 22, -1)))
    assert engine.cached_tokens(job(9, range(30))) == 23 * BLOCK


def test_it_tells_how_much_is_left_of_what_runs_and_waits() -> None:
    engine = an_engine()
    engine.submit(job(1, range(10)), 0.0)
    engine.submit(job(2, range(20, 30)), 0.0)
    assert (engine.running_uncached_tokens(0.08), engine.waiting_uncached_tokens) == (pytest.approx(80, abs=1), 160)
    assert (engine.num_running, engine.num_in_flight) == (1, 2)


def test_a_model_that_decodes_slower_prefills_as_fast() -> None:
    slow = MODEL.decoding_slower(4.0)
    assert slow.decode_step_seconds == 4 * MODEL.decode_step_seconds
    assert slow.prefill_seconds(100, 0) == MODEL.prefill_seconds(100, 0)


def test_it_tells_how_fast_its_steps_were_of_late() -> None:
    engine = an_engine()
    assert engine.recent_steps_per_second == 0.0
    engine.submit(job(1, range(10), num_output_tokens=2000), 0.0)
    run(engine, until=60.0)
    assert engine.recent_steps_per_second == pytest.approx(100.0, rel=0.01)
