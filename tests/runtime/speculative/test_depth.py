"""Adaptive depth: what pays is drafted, what does not is left, and what was left is tried again."""

import numpy as np
import pytest

from kvasir_runtime.speculative.depth import (
    FIRST_DRAFT_INTERVAL,
    LAST_DRAFT_INTERVAL,
    PLAIN_INTERVAL,
    DepthPolicy,
    IntArray,
    StepSeconds,
    best_depths,
)

PLAIN_SECONDS = 0.010


class Engine:
    """Steps of a batch whose drafts hold with given chances, and cost what they are said to cost."""

    def __init__(self, acceptance: list[float], seconds_a_draft: float, max_depth: int = 4) -> None:
        self.policy = DepthPolicy(8, max_depth)
        self.rows = np.arange(len(acceptance))
        self.acceptance = np.array(acceptance)
        self.seconds_a_draft = seconds_a_draft
        self._rng = np.random.default_rng(0)

    def step(self) -> IntArray:
        depths = self.policy.depths(self.rows)
        held = self._rng.random((len(self.rows), self.policy.max_depth)) < self.acceptance[:, None]
        accepted = np.minimum(held.cumprod(1).sum(1), depths)
        self.policy.observe(self.rows, depths, accepted)
        seconds = PLAIN_SECONDS + self.seconds_a_draft * float(depths.mean())
        self.policy.observe_step(len(self.rows), int(depths.sum()), int(depths.max()), seconds)
        return depths

    def run(self, num_steps: int) -> np.ndarray:
        return np.stack([self.step() for _ in range(num_steps)])


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
    drafted = Engine([0.0], seconds_a_draft=0.001).run(6000)[:, 0] > 0
    early, late = drafted[: FIRST_DRAFT_INTERVAL * 4], drafted[-2 * LAST_DRAFT_INTERVAL :]
    assert 0 < late.mean() < 0.02 < early.mean()


def test_drafts_come_back_once_they_hold() -> None:
    engine = Engine([0.0], seconds_a_draft=0.001)
    engine.run(100)
    engine.acceptance[:] = 1.0
    assert (engine.run(400)[-20:] == 4).all()


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
    policy.observe_step(1, 0, 2, seconds=99.0)
    policy.observe_step(1, 2, 0, seconds=99.0)
    assert policy._cost(1).plain_seconds == 0.0


def test_the_same_observations_give_the_same_depths() -> None:
    first, second = Engine([0.6, 0.3], 0.002), Engine([0.6, 0.3], 0.002)
    assert (first.run(300) == second.run(300)).all()


def test_the_believed_time_of_a_step_leans_on_the_faster_ones() -> None:
    believed = StepSeconds()
    for seconds in [0.004, 0.008] * 50:  # every other step waits for other work
        believed.add(seconds)
    assert believed.mean < 0.005
