"""Adaptive depth: what pays is drafted, what does not is left, and what was left is tried again."""

from dataclasses import replace

import numpy as np
import pytest

from kvasir_runtime.scheduling.step import TimedStep
from kvasir_runtime.speculative.depth import REVIEW_STEPS, DepthPolicy, IntArray, best_depths
from kvasir_runtime.speculative.step_cost import (
    FEWEST_STEPS_BETWEEN_PROBES,
    MOST_PROBE_PLANS,
    PLAIN_INTERVAL,
    PROBE_SHARE,
    PROBE_STEPS,
    BatchCost,
    PromptCost,
    StepSeconds,
)

PLAIN_SECONDS = 0.010


class Engine:
    """Steps of a batch whose drafts hold with given chances, and cost what they are said to cost."""

    def __init__(self, acceptance: list[float], seconds_a_draft: float, policy: DepthPolicy | None = None) -> None:
        self.policy = policy or DepthPolicy(8, 4)
        self.rows = np.arange(len(acceptance))
        self.acceptance = np.array(acceptance)
        self.seconds_a_draft = seconds_a_draft
        self.seconds = 0.0
        self._rng = np.random.default_rng(0)
        self._num_ready = 0

    def step(self) -> IntArray:
        """Drafts to propose; those of the step before are verified."""
        depths = self.policy.depths(self.rows)
        asked = np.minimum(depths, self._num_ready)
        self._num_ready = int(depths.max())
        held = self._rng.random((len(self.rows), self.policy.max_depth)) < self.acceptance[:, None]
        if asked.any():
            self.policy.observe(self.rows, asked, np.minimum(held.cumprod(1).sum(1), asked))
        seconds = PLAIN_SECONDS + self.seconds_a_draft * float(depths.mean())
        self.seconds += seconds
        self.policy.observe_step(
            timed(len(self.rows), seconds, num_asked=int(asked.sum()), num_proposals=self._num_ready)
        )
        return depths

    def run(self, num_steps: int) -> np.ndarray:
        return np.stack([self.step() for _ in range(num_steps)])


def timed(num_decodes: int, seconds: float, **changes: int | float) -> TimedStep:
    step = {"num_prompt_tokens": 0, "num_asked": 0, "num_proposals": 0, "proposer_seconds": 0.0}
    return TimedStep(
        num_decodes=num_decodes, seconds=seconds, clock_seconds=seconds, is_catching_up=False, **(step | changes)
    )


def test_drafts_that_always_hold_are_asked_for_in_full() -> None:
    assert (Engine([1.0], seconds_a_draft=0.001).run(200)[-50:] == 4).all()


def test_drafts_that_never_hold_are_left() -> None:
    assert (Engine([0.0], seconds_a_draft=0.001).run(400)[-200:] == 0).mean() > 0.9


def test_drafts_that_hold_but_cost_a_whole_step_each_are_left() -> None:
    assert (Engine([0.9], seconds_a_draft=0.011).run(60)[-20:] == 0).all()


def test_a_request_whose_drafts_hold_gets_more_than_its_neighbour() -> None:
    depths = Engine([0.95, 0.2], seconds_a_draft=0.003).run(400)[-100:].mean(0)
    assert depths[0] > 3
    assert depths[1] < 1.5


@pytest.mark.parametrize(("draft_seconds", "expected"), [(0.004, 1), (0.0001, 4)])
def test_depth_is_where_tokens_a_second_are_highest(draft_seconds: float, expected: int) -> None:
    chances = np.array([[0.5, 0.25, 0.125, 0.0625]])
    rates = [(1 + chances[0, :depth].sum()) / (0.010 + draft_seconds * depth) for depth in range(5)]
    assert best_depths(chances, 0.010, draft_seconds).tolist() == [expected] == [int(np.argmax(rates))]


def test_no_draft_is_taken_for_a_gain_within_the_noise() -> None:
    assert best_depths(np.array([[0.5]]), 0.010, 0.0049).tolist() == [0]


def test_drafts_are_tried_again_ever_more_rarely_where_they_do_not_pay() -> None:
    probes = np.flatnonzero(np.diff(Engine([0.0], seconds_a_draft=0.01).run(4000)[:, 0].astype(bool).astype(int)) == 1)
    waits = np.diff(probes)
    assert FEWEST_STEPS_BETWEEN_PROBES <= waits[0] < 1.2 * FEWEST_STEPS_BETWEEN_PROBES
    assert waits[1] > 1.4 * waits[0]


@pytest.mark.parametrize("seconds_a_draft", [0.001, 0.01, 0.05])
def test_what_trying_drafts_again_costs_is_a_small_share_of_the_time(seconds_a_draft: float) -> None:
    engine = Engine([0.0], seconds_a_draft)
    engine.run(1000)
    engine.seconds = 0.0
    engine.run(10_000)
    assert engine.seconds < (1 + 1.5 * PROBE_SHARE) * 10_000 * PLAIN_SECONDS


def test_where_drafts_do_not_pay_nothing_is_weighed_between_reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([0.0] * 8, seconds_a_draft=0.02)
    engine.run(100)
    reviews = []
    review = engine.policy._review
    monkeypatch.setattr(engine.policy, "_review", lambda *args: reviews.append(args) or review(*args))
    engine.run(10 * REVIEW_STEPS)
    assert 8 <= len(reviews) <= 12


def test_new_sequences_are_weighed_at_once() -> None:
    engine = Engine([1.0], seconds_a_draft=0.001)
    engine.run(100)
    engine.acceptance[:] = 0.0
    while engine.policy._batches.of(1).drafts_pay:
        engine.step()
    engine.policy.forget(0)
    engine.acceptance[:] = 1.0
    assert engine.run(2).any()


def test_another_batch_size_begins_with_what_the_nearest_has_measured() -> None:
    small = Engine([0.3, 0.3], seconds_a_draft=0.02)
    small.run(200)
    assert not Engine([0.3] * 8, 0.02, small.policy).run(FEWEST_STEPS_BETWEEN_PROBES).any()


def test_a_probe_asks_for_no_more_than_what_promises_most() -> None:
    engine = Engine([0.3], seconds_a_draft=0.008)
    engine.run(100)
    assert engine.run(2000).max() == 1


def test_drafts_come_back_once_they_hold() -> None:
    engine = Engine([0.0], seconds_a_draft=0.001)
    engine.run(100)
    engine.acceptance[:] = 1.0
    assert (engine.run(400)[-20:] == 4).mean() > 0.8, "all steps but those that time plain ones"


def test_drafts_come_back_once_they_are_cheap() -> None:
    engine = Engine([0.9], seconds_a_draft=0.02)
    assert (engine.run(60)[-5:] == 0).all()
    engine.seconds_a_draft = 0.0005
    assert (engine.run(1500)[-20:] == 4).all()


def test_a_step_without_drafts_is_timed_again() -> None:
    depths = Engine([1.0], seconds_a_draft=0.001).run(PLAIN_INTERVAL + 20)[:, 0]
    assert (depths[PLAIN_INTERVAL:] == 0).any()


def test_a_row_given_to_another_sequence_starts_from_what_all_have_shown() -> None:
    policy = DepthPolicy(4, 2)
    rows = np.array([0, 1])
    for _ in range(50):
        policy.observe(rows, np.array([2, 2]), np.array([2, 0]))
    policy.forget(1)
    fresh = policy._acceptance.chances
    assert fresh[1, 0] == pytest.approx(0.5, abs=0.05)
    assert fresh[0, 0] > 0.8


def test_drafts_behind_a_refused_one_were_not_tried() -> None:
    policy = DepthPolicy(1, 3)
    before = policy._acceptance.chances[0].copy()
    policy.observe(np.array([0]), np.array([3]), np.array([0]))
    chances = policy._acceptance.chances[0]
    assert chances[0] < before[0]
    assert chances[1] / chances[0] == pytest.approx(before[1] / before[0])


def test_steps_that_only_begin_or_end_drafting_are_not_timed() -> None:
    policy = DepthPolicy(1, 2)
    policy.observe_step(timed(1, 99.0, num_proposals=2))
    policy.observe_step(timed(1, 99.0, num_asked=2))
    cost = policy._batches.of(1).cost
    assert (cost.plain.num_samples, cost.drafted.num_samples) == (0, 0)


def test_a_probe_ends_although_every_step_has_prompts() -> None:
    policy, rows = DepthPolicy(4, 2), np.arange(2)
    for _ in range(PROBE_STEPS):
        policy.observe_step(timed(2, 0.01))
    num_drafted = 0
    for _ in range(200):
        depths = policy.depths(rows)
        num_drafted += bool(depths.any())
        policy.observe_step(timed(2, 0.02, num_prompt_tokens=9, num_asked=2, num_proposals=int(depths.max())))
    assert num_drafted == MOST_PROBE_PLANS


def test_steps_in_which_a_proposer_catches_up_are_not_timed() -> None:
    cost = BatchCost()
    cost.observe(replace(timed(1, 99.0, num_asked=2, num_proposals=2), is_catching_up=True))
    assert cost.drafted.num_samples == 0


def test_a_probe_is_compared_with_the_steps_just_before_it() -> None:
    """A busy machine makes all steps slower."""
    quiet, busy = BatchCost(), BatchCost()
    for cost, factor in ((quiet, 1.0), (busy, 2.0)):
        for _ in range(50):
            cost.observe(timed(1, 0.01))
        for _ in range(20):
            cost.observe(timed(1, 0.01 * factor))
        cost.begin_probe()
        for _ in range(PROBE_STEPS):
            cost.observe(timed(1, 0.015 * factor, num_asked=1, num_proposals=1))
    assert busy.ratio == pytest.approx(quiet.ratio, rel=0.05)


def test_what_prompts_cost_the_proposer_is_spread_over_the_steps_that_decode() -> None:
    cost = PromptCost()
    for _ in range(300):
        for _ in range(9):
            cost.observe(timed(4, 0.01, num_proposals=2, proposer_seconds=0.001))
        cost.observe(timed(4, 0.02, num_proposals=2, num_prompt_tokens=500, proposer_seconds=0.006))
    assert cost.seconds_a_step == pytest.approx(0.0005, rel=0.1)


def test_drafts_must_bring_in_what_prompts_cost_too() -> None:
    chances = np.array([[0.5]])
    assert best_depths(chances, 0.010, 0.003).tolist() == [1]
    assert best_depths(chances, 0.010, 0.003, fixed_seconds=0.002).tolist() == [0]


def test_the_same_observations_give_the_same_depths() -> None:
    first, second = Engine([0.6, 0.3], 0.002), Engine([0.6, 0.3], 0.002)
    assert (first.run(300) == second.run(300)).all()


def test_the_believed_time_of_a_step_leans_on_the_faster_ones() -> None:
    believed = StepSeconds()
    for seconds in [0.004, 0.008] * 50:  # every other step waits for other work
        believed.add(seconds)
    assert believed.mean < 0.005
