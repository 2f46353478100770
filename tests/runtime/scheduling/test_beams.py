"""Beam searches in the scheduler come to what the search alone comes to, whatever else runs."""

from dataclasses import dataclass, replace

import pytest
from tests.runtime.scheduling.fake_rank import FakeRank, candidates_after, continuation

from kvasir_runtime.kv_cache.spec import KvGroup, Reach
from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.scheduling.beam_search import BeamSearchState, Hypothesis, num_candidates
from kvasir_runtime.scheduling.step import StepPlan, StepResult

PROMPT = [3, 1, 4, 1, 5, 9]
FULL = (KvGroup((0,)),)
WINDOWS = (KvGroup((0,)), KvGroup((1,), Reach.window(6)))


def search(beam: BeamSearch, max_tokens: int, stop: tuple[int, ...] = ()) -> list[Hypothesis]:
    state = BeamSearchState(beam, frozenset(stop), 0, max_tokens)
    number = num_candidates(beam.width, len(stop))
    while state.advance([candidates_after([*PROMPT, *each.output_token_ids], number) for each in state.beams]):
        pass
    return state.hypotheses


def names(request: str, n: int) -> list[str]:
    return [request, *(f"{request}.{index}" for index in range(1, n))]


@pytest.mark.parametrize("groups", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_hypotheses_are_those_of_the_search_alone_best_first(make_engine, width, ahead, groups):
    engine = make_engine(ahead=ahead, groups=groups)
    beam = BeamSearch(width=width)
    request = engine.add(PROMPT, beam=beam, n=width, max_tokens=11)
    other = engine.add([8] * 5, max_tokens=14)
    tokens, expected = engine.run(), search(beam, 11)
    assert [tokens[name] for name in names(request, width)] == [list(h.beam.output_token_ids) for h in expected]
    assert tokens[other] == continuation([8] * 5, 14)
    assert (engine.kv.pool.num_used, engine.scheduler.num_free_rows) == (0, 8)


def test_only_as_many_hypotheses_as_asked_for_are_told(make_engine):
    engine = make_engine()
    request = engine.add(PROMPT, beam=BeamSearch(width=4), n=2, max_tokens=6)
    assert set(engine.run()) == set(names(request, 2))


def test_a_hypothesis_tells_how_it_ended(make_engine):
    beam = BeamSearch(width=2)
    stop = (search(beam, 5)[0].beam.output_token_ids[2],)
    engine = make_engine()
    request = engine.add(PROMPT, beam=beam, n=2, max_tokens=5, stop_token_ids=stop)
    engine.run()
    outputs = [engine.outputs[name][0] for name in names(request, 2)]
    expected = search(beam, 5, stop)
    assert [output.finish_reason for output in outputs] == [h.finish_reason for h in expected]
    assert any(output.finish_reason == "stop" for output in outputs)
    assert [output.stop_token_id for output in outputs] == [
        stop[0] if h.finish_reason == "stop" else None for h in expected
    ]


@pytest.mark.parametrize("num_blocks", [12, 14, 17])
def test_a_preempted_search_comes_to_the_same_hypotheses(make_engine, num_blocks):
    engine = make_engine(num_blocks=num_blocks, cache=False)
    other = engine.add([8] * 5, max_tokens=30)
    beam = BeamSearch(width=3)
    request = engine.add(PROMPT, beam=beam, n=3, max_tokens=12)
    tokens = engine.run()
    assert [tokens[name] for name in names(request, 3)] == [list(h.beam.output_token_ids) for h in search(beam, 12)]
    assert tokens[other] == continuation([8] * 5, 30)
    assert (engine.kv.pool.num_used, engine.scheduler.num_free_rows) == (0, 8)


def test_a_search_that_begins_again_for_want_of_pages_counts_as_preempted(make_engine):
    """Its forks lack pages as often as the stream before it takes some."""
    engine = make_engine(num_blocks=10, cache=False)
    engine.add([8] * 5, max_tokens=30)
    engine.add(PROMPT, beam=BeamSearch(width=2), n=2, max_tokens=12)
    added = 0
    while engine.scheduler.has_work:
        plan = engine.step()
        added += len(plan.added) if plan else 0
    assert engine.scheduler.stats(0, 0.0).num_preemptions == added - 2 > 0


def test_a_search_that_does_not_fit_beside_pages_held_for_other_engines_begins_again(make_engine):
    engine = make_engine(num_blocks=12)
    offered = engine.add(list(range(200, 240)), max_tokens=1)
    engine.scheduler.remote.offer(offered, 40)
    engine.run()
    assert engine.kv.pool.num_used == 9
    beam = BeamSearch(width=3)
    request = engine.add(PROMPT, beam=beam, n=3, max_tokens=11)
    for _ in range(40):
        engine.step()
    assert request not in engine.outputs
    engine.scheduler.remote.end_offer(offered)
    tokens = engine.run()
    assert [tokens[name] for name in names(request, 3)] == [list(h.beam.output_token_ids) for h in search(beam, 11)]


@dataclass
class RankWithoutScores:
    """Another rank, whose candidates for prompts that end in this token have no log-probabilities."""

    rank: FakeRank
    end: int

    def run(self, plan: StepPlan) -> StepResult:
        result = self.rank.run(plan)
        for row, candidates in result.candidates.items():
            if self.rank.rows[row].token_ids[len(PROMPT)] == self.end:
                result.candidates[row] = replace(candidates, logprobs=[])
        return result


def test_a_search_that_cannot_be_reckoned_ends_with_an_error_and_others_go_on(make_engine, caplog):
    engine = make_engine()
    beam = BeamSearch(width=2)
    broken, whole = (engine.add([*PROMPT, end], beam=beam, n=2, max_tokens=6) for end in (1, 2))
    stream = engine.add([8] * 5, max_tokens=9)
    engine.rank = RankWithoutScores(engine.rank, end=1)
    tokens = engine.run()
    for name in names(broken, 2):
        (output,) = engine.outputs[name]
        assert output.finish_reason == "error"
        assert "could not be broadcast" in output.error
    assert [len(tokens[name]) for name in (*names(whole, 2), stream)] == [6, 6, 9]
    assert (engine.kv.pool.num_used, engine.scheduler.num_free_rows) == (0, 8)
    assert broken in {record.__dict__.get("request_id") for record in caplog.records}


def test_a_search_waits_until_there_are_rows_for_all_of_its_beams(make_engine):
    engine = make_engine(max_num_seqs=3)
    engine.add([8] * 5, max_tokens=4)
    engine.add(PROMPT, beam=BeamSearch(width=3), max_tokens=4)
    plans = [engine.step() for _ in range(5)]
    assert [len(plan.added) for plan in plans] == [1, 0, 0, 0, 1]


def test_beams_keep_rows_for_those_to_come(make_engine):
    engine = make_engine(max_num_seqs=4)
    engine.add(PROMPT, beam=BeamSearch(width=3), max_tokens=9)
    for token in range(2):
        engine.add([token], max_tokens=9)
    assert [len(engine.step().added) for _ in range(3)] == [2, 0, 0]


def test_an_aborted_search_gives_back_its_rows_and_blocks(make_engine):
    for num_steps in (1, 2, 5):
        engine = make_engine()
        request = engine.add(PROMPT, beam=BeamSearch(width=4), n=4, max_tokens=20)
        for _ in range(num_steps):
            engine.step()
        engine.scheduler.abort(request, 2)
        assert engine.scheduler.has_work, "one beam cannot be aborted"
        engine.scheduler.abort(request)
        assert engine.run() == {}
        assert (engine.kv.pool.num_used, engine.scheduler.num_free_rows) == (0, 8)
