"""Which beams go on and which hypotheses are complete: bookkeeping over candidates."""

import math
import tracemalloc
from functools import cache

import numpy as np
import pytest

from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.scheduling.beam_search import Beam, BeamSearchState, Hypothesis, OutputToken, num_candidates
from kvasir_runtime.scheduling.step import Candidates

STOP = 9


def make_state(width: int, *, max_tokens: int = 10, min_tokens: int = 0, **params: object) -> BeamSearchState:
    return BeamSearchState(BeamSearch(width=width, **params), frozenset({STOP}), min_tokens, max_tokens)


def after(**logprobs: float) -> Candidates:
    """Candidates by token (`t5=-0.1`), best first."""
    ordered = sorted(logprobs.items(), key=lambda entry: -entry[1])
    return Candidates([int(token[1:]) for token, _ in ordered], [logprob for _, logprob in ordered])


def outputs(state: BeamSearchState) -> list[tuple[tuple[int, ...], float, str]]:
    return [(h.beam.output_token_ids, round(h.score, 6), h.finish_reason) for h in state.hypotheses]


@pytest.mark.parametrize(
    ("width", "num_stop_ids", "expected"), [(1, 0, 1), (3, 0, 3), (3, 1, 4), (3, 2, 5), (128, 1024, 1152)]
)
def test_enough_candidates_of_a_beam_are_looked_at_that_width_are_left_when_all_stop_tokens_are_among_them(
    width, num_stop_ids, expected
):
    assert num_candidates(width, num_stop_ids) == expected


def test_one_beam_takes_the_best_token_each_step():
    state = make_state(1)
    assert [c.token_id for c in state.advance([after(t1=-0.1, t2=-0.5)])] == [1]
    assert [c.token_id for c in state.advance([after(t2=-0.2, t1=-0.9)])] == [2]
    (beam,) = state.beams
    assert (beam.output_token_ids, beam.num_tokens, beam.logprob) == ((1, 2), 2, pytest.approx(-0.3))


def test_one_beam_ends_at_its_stop_token():
    state = make_state(1)
    state.advance([after(t1=-0.5, t2=-0.9)])
    assert state.advance([after(t9=-0.1, t2=-0.9)]) == []
    assert outputs(state) == [((1, STOP), -0.3, "stop")]


def test_the_best_continuations_of_all_beams_go_on_best_first_with_their_parents():
    state = make_state(2)
    state.advance([after(t1=-0.1, t2=-1.0)])
    open_ones = state.advance([after(t3=-2.0, t4=-3.0), after(t5=-0.2, t6=-0.3)])
    assert [(c.parent, c.token_id) for c in open_ones] == [(1, 5), (1, 6)]
    assert [beam.output_token_ids for beam in state.beams] == [(2, 5), (2, 6)]
    assert state.beams[0].logprob == pytest.approx(-1.2)


def test_equal_continuations_keep_the_order_of_beams_and_candidates():
    state = make_state(2)
    state.advance([after(t1=-0.5, t2=-0.5)])
    assert [beam.output_token_ids for beam in state.beams] == [(1,), (2,)]
    open_ones = state.advance([Candidates([4, 3], [-0.5, -0.5]), Candidates([6, 5], [-0.5, -0.5])])
    assert [(c.parent, c.token_id) for c in open_ones] == [(0, 4), (0, 3)]


def test_many_equal_continuations_keep_the_order_of_beams_and_candidates():
    state = make_state(60)
    state.beams = [Beam(), Beam()]
    open_ones = state.advance([Candidates(list(range(50, 10, -1)), [-0.5] * 20 + [-1.0] * 20)] * 2)
    likely, unlikely = range(50, 30, -1), range(30, 10, -1)
    in_order = [(0, likely), (1, likely), (0, unlikely)]
    assert [(c.parent, c.token_id) for c in open_ones] == [
        (parent, token) for parent, some in in_order for token in some
    ]


def test_an_ended_continuation_among_the_best_becomes_a_hypothesis_and_leaves_its_place_to_the_next():
    state = make_state(2)
    open_ones = state.advance([after(t9=-0.1, t1=-0.2, t2=-0.3, t3=-0.4)])
    assert [c.token_id for c in open_ones] == [1, 2]
    assert outputs(state) == [((STOP,), -0.1, "stop")]


def test_an_ended_continuation_behind_the_best_is_dropped():
    state = make_state(2)
    open_ones = state.advance([after(t1=-0.1, t2=-0.2, t9=-0.3, t3=-0.4)])
    assert [c.token_id for c in open_ones] == [1, 2]
    assert state.hypotheses == []


def test_an_ended_continuation_at_the_last_place_of_the_best_counts():
    state = make_state(2)
    state.advance([after(t1=-0.1, t9=-0.2, t2=-0.3, t3=-0.4)])
    assert outputs(state) == [((STOP,), -0.2, "stop")]


@pytest.mark.parametrize(("min_tokens", "ends"), [(0, True), (1, False)])
def test_a_stop_token_ends_only_beyond_min_tokens(min_tokens, ends):
    state = make_state(1, min_tokens=min_tokens)
    assert (state.advance([after(t9=-0.1, t1=-5.0)]) == []) == ends
    assert bool(state.hypotheses) == ends


def test_a_stop_token_within_min_tokens_goes_on_as_any_other():
    state = make_state(1, min_tokens=1)
    assert [c.token_id for c in state.advance([after(t9=-0.1, t1=-5.0)])] == [STOP]
    assert state.advance([after(t9=-0.1, t1=-5.0)]) == []
    assert outputs(state) == [((STOP, STOP), -0.1, "stop")]


def test_all_beams_end_at_max_tokens():
    state = make_state(2, max_tokens=2)
    state.advance([after(t1=-0.1, t2=-0.4)])
    assert state.advance([after(t3=-0.1, t4=-9.0), after(t5=-0.2, t6=-9.0)]) == []
    assert outputs(state) == [((1, 3), -0.1, "length"), ((2, 5), -0.3, "length")]


def test_a_stop_token_as_the_last_token_allowed_is_a_stop():
    state = make_state(1, max_tokens=1)
    assert state.advance([after(t9=-0.1, t1=-0.2)]) == []
    assert outputs(state) == [((STOP,), -0.1, "stop")]


@pytest.mark.parametrize(("penalty", "best"), [(0.0, (STOP,)), (1.0, (1, STOP)), (-1.0, (STOP,))])
def test_the_length_penalty_is_the_exponent_of_the_length(penalty, best):
    state = make_state(2, length_penalty=penalty)
    state.advance([after(t9=-0.5, t1=-0.3, t2=-3.0, t3=-4.0)])
    state.advance([after(t9=-0.5, t4=-5.0), after(t5=-9.0, t6=-9.5)])
    assert state.hypotheses[0].beam.output_token_ids == best
    scores = {h.beam.output_token_ids: h.score for h in state.hypotheses}
    assert scores[1, STOP] == pytest.approx(-0.8 / 2**penalty)


def test_a_search_goes_on_while_a_beam_can_better_the_worst_hypothesis():
    state = make_state(1, length_penalty=1.0)
    state.advance([after(t1=-2.0, t2=-2.1)])
    assert state.advance([after(t9=-2.0, t3=-2.1)]) == [], "-4.1 / 2 is worse than -4 / 2"
    state = make_state(2, length_penalty=1.0)
    state.advance([after(t9=-1.0, t1=-1.5, t2=-1.6, t3=-9.0)])
    open_ones = state.advance([after(t9=-3.0, t3=-0.1), after(t4=-8.0, t5=-9.0)])
    assert open_ones, "-1.6 / 2 is better than -4.5 / 2"


def test_a_beam_that_can_only_draw_level_is_given_up():
    state = make_state(1, length_penalty=1.0)
    state.advance([after(t1=-1.0, t2=-1.5)])
    assert state.advance([after(t9=-1.0, t3=-1.0)]) == []


def test_early_stopping_ends_as_soon_as_width_hypotheses_are_complete():
    for early_stopping in (False, True):
        state = make_state(2, early_stopping=early_stopping)
        state.advance([after(t9=-1.0, t1=-1.5, t2=-1.6, t3=-9.0)])
        open_ones = state.advance([after(t9=-3.0, t3=-0.1), after(t4=-8.0, t5=-9.0)])
        assert (open_ones == []) == early_stopping
        assert len(state.hypotheses) == 2


@pytest.mark.parametrize(("penalty", "goes_on"), [(1.0, True), (0.0, False), (-1.0, False)])
def test_a_search_that_never_stops_early_goes_on_while_a_beam_could_still_become_better(penalty, goes_on):
    state = make_state(1, length_penalty=penalty, early_stopping="never", max_tokens=3)
    state.advance([after(t1=-2.0, t2=-2.1)])
    open_ones = state.advance([after(t9=-2.0, t3=-3.5)])
    assert bool(open_ones) == goes_on, "-5.5 / 2 is worse than -4 / 2, and -5.5 / 3 is better"


def test_a_search_that_never_stops_early_ends_where_a_beam_could_only_draw_level():
    state = make_state(1, length_penalty=1.0, early_stopping="never", max_tokens=4)
    state.advance([after(t1=-2.0, t2=-2.1)])
    assert state.advance([after(t9=-2.0, t3=-6.0)]) == [], "-8 / 4 is -4 / 2"


def test_a_beam_that_length_makes_worse_is_judged_as_it_is():
    state = make_state(2, length_penalty=-1.0, early_stopping="never")
    state.advance([after(t9=-0.5, t1=-0.6, t2=-0.7, t3=-9.0)])
    open_ones = state.advance([after(t3=-0.1, t9=-8.0), after(t9=-0.3, t4=-8.0)])
    assert open_ones, "-0.7 * 2 is better than -1.0 * 2, and -0.7 * 10 is worse"


def test_early_stopping_does_not_end_before_width_hypotheses():
    state = make_state(2, early_stopping=True)
    assert state.advance([after(t9=-0.1, t1=-5.0, t2=-6.0, t3=-7.0)])


def test_better_hypotheses_push_out_the_worst():
    state = make_state(2, length_penalty=0.0)
    state.advance([after(t9=-3.0, t1=-0.1, t2=-3.5, t3=-9.0)])
    state.advance([after(t9=-2.5, t3=-0.1), after(t4=-8.0, t5=-9.0)])
    state.advance([after(t9=-0.1, t3=-0.2), after(t4=-8.0, t5=-9.0)])
    assert [h.beam.output_token_ids for h in state.hypotheses] == [(1, 3, STOP), (1, STOP)]


def test_a_stop_token_is_not_looked_for_where_there_are_none():
    state = BeamSearchState(BeamSearch(width=1), frozenset(), 0, 10)
    assert state.advance([after(t9=-0.1, t1=-0.2)])


VOCAB_SIZE = 12


@cache
def logprobs_after(output: tuple[int, ...], seed: int) -> list[float]:
    """Of every token: a model with a vocabulary so small that stop tokens are often among the likeliest."""
    logits = np.random.default_rng([seed, *output]).normal(scale=2.0, size=VOCAB_SIZE)
    return (logits - np.log(np.exp(logits).sum())).tolist()


def likeliest(output: tuple[int, ...], seed: int, number: int) -> Candidates:
    logprobs = logprobs_after(output, seed)
    tokens = sorted(range(VOCAB_SIZE), key=lambda token: -logprobs[token])[:number]
    return Candidates(tokens, [logprobs[token] for token in tokens])


def found(state: BeamSearchState, seed: int) -> list[tuple[tuple[int, ...], str]]:
    number = num_candidates(state.params.width, len(state.stop_token_ids))
    while state.advance([likeliest(beam.output_token_ids, seed, number) for beam in state.beams]):
        pass
    return [(h.beam.output_token_ids, h.finish_reason) for h in state.hypotheses]


def plainly_found(params: BeamSearch, stop: frozenset[int], min_tokens: int, max_tokens: int, seed: int):
    """The rules as Hugging Face writes them: over every token of every beam."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    hypotheses: list[tuple[float, tuple[int, ...], str]] = []
    width, num_kept = params.width, max(2, 1 + len(stop)) * params.width
    for length in range(1, max_tokens + 1):
        pool = [
            ((*output, token), total + logprob)
            for output, total in beams
            for token, logprob in enumerate(logprobs_after(output, seed))
        ]
        best = sorted(pool, key=lambda entry: -entry[1])[:num_kept]
        is_stop = [output[-1] in stop and length > min_tokens for output, _ in best]
        has_ended = [stops or length == max_tokens for stops in is_stop]
        for index in range(width):
            if has_ended[index]:
                output, total = best[index]
                hypotheses.append(
                    (total / length**params.length_penalty, output, "stop" if is_stop[index] else "length")
                )
        hypotheses = sorted(hypotheses, key=lambda entry: -entry[0])[:width]
        beams = [entry for entry, ended in zip(best, has_ended, strict=True) if not ended][:width]
        if not beams:
            break
        at_best = max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        if len(hypotheses) == width and (
            params.early_stopping is True or beams[0][1] / at_best**params.length_penalty <= hypotheses[-1][0]
        ):
            break
    return [(output, reason) for _, output, reason in hypotheses]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("num_stop_ids", [0, 1, 3, 8])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_search_comes_to_what_looking_at_every_token_comes_to(width, num_stop_ids, early_stopping):
    stop = frozenset(range(num_stop_ids))
    for seed in range(30):
        penalty, min_tokens = (-1.0, 0.0, 1.0, 2.0)[seed % 4], seed % 3
        params = BeamSearch(width=width, length_penalty=penalty, early_stopping=early_stopping)
        state = BeamSearchState(params, stop, min_tokens, 8)
        assert found(state, seed) == plainly_found(params, stop, min_tokens, 8, seed)


def long_beams(width: int, num_tokens: int) -> list[Beam]:
    last = None
    for token in range(num_tokens):
        last = OutputToken(token, last)
    return [Beam(last, num_tokens, -float(index)) for index in range(width)]


@pytest.mark.parametrize("logprob", [0.0, -1e-30, -1e44, -math.inf])
@pytest.mark.parametrize("penalty", [-10.0, 10.0])
def test_the_greatest_penalties_of_the_longest_outputs_are_numbers_that_rank(penalty, logprob):
    state = make_state(3, max_tokens=10**6, length_penalty=penalty)
    state.beams = [Beam(None, 10**6 - 2, logprob)]
    assert state.advance([after(t9=-0.1, t1=-0.2, t2=-0.3, t3=-0.4)])
    assert state.advance([after(t9=-0.1, t4=-0.2), after(t5=-0.2, t6=-0.3), after(t7=-0.2, t8=-0.3)]) == []
    scores = [h.score for h in state.hypotheses]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert not any(map(math.isnan, scores))
    assert all(map(math.isfinite, scores)) == math.isfinite(logprob)


def test_what_is_not_a_number_is_the_last_choice():
    state = make_state(2, max_tokens=2)
    open_ones = state.advance([Candidates([3, 4], [math.nan, -0.1])])
    assert [(c.token_id, c.beam.logprob) for c in open_ones] == [(4, -0.1), (3, -math.inf)]
    state.advance([Candidates([5], [math.nan]), Candidates([6], [-0.1])])
    assert [(h.beam.output_token_ids, h.score) for h in state.hypotheses] == [
        ((4, 5), -math.inf),
        ((3, 6), -math.inf),
    ]


def test_continuations_share_what_they_have_in_common():
    state = make_state(2)
    state.advance([after(t1=-0.1, t2=-5.0)])
    (parent, _) = state.beams
    state.advance([after(t3=-0.1, t4=-0.2), after(t5=-0.1, t6=-0.2)])
    assert [beam.last.before for beam in state.beams] == [parent.last, parent.last]


def test_a_step_of_a_wide_and_long_search_copies_no_outputs():
    state = make_state(128, max_tokens=20_000)
    state.beams = long_beams(128, 10_000)
    candidates = [Candidates(list(range(10, 139)), [-0.1 * place for place in range(129)])] * 128
    tracemalloc.start()
    try:
        assert len(state.advance(candidates)) == 128
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4_000_000, "a single copy for each of the beams takes 10 MB"


def test_a_very_long_output_is_read_shown_and_let_go_of():
    (beam,) = long_beams(1, 200_000)
    assert beam.output_token_ids == tuple(range(200_000))
    assert len(repr(Hypothesis(beam, 0.0, "stop"))) < 200
    del beam
