"""Adaptive depth: what pays is drafted, what does not is left, and what was left is tried again."""

from dataclasses import replace

import numpy as np
import pytest

from kvasir_runtime.scheduling.step import TimedStep
from kvasir_runtime.speculative.depth import (
    FEWEST_STEPS_BETWEEN_TRIALS,
    PLAIN_INTERVAL,
    STEPS_WITH_PROMPTS,
    TIMINGS,
    TRIAL_STEPS,
    Acceptance,
    DepthPolicy,
    IntArray,
    best_depths,
)

PLAIN_SECONDS = 0.010


class Engine:
    """Steps of a batch whose drafts hold with given chances, and cost what they are said to cost."""

    def __init__(self, acceptance: list[float], seconds_a_draft: float, policy: DepthPolicy | None = None) -> None:
        self.policy = policy or DepthPolicy(8, 4)
        self.rows = np.arange(len(acceptance))
        self.acceptance = np.array(acceptance)
        self.seconds_a_draft = seconds_a_draft
        self.fixed_seconds = 0.0
        self.prompt_tokens = 0
        self.seconds = 0.0
        self._rng = np.random.default_rng(0)
        self._num_ready = 0

    def step(self) -> IntArray:
        """Drafts to propose; those of the step before are verified."""
        depths = self.policy.depths(self.rows)
        asked = np.minimum(depths, self._num_ready)
        self._num_ready = int(depths.max())
        held = self._rng.random((len(self.rows), self.policy.max_depth)) < self.acceptance[:, None]
        accepted = np.minimum(held.cumprod(1).sum(1), asked)
        if asked.any():
            self.policy.observe(self.rows, asked, accepted)
        seconds = PLAIN_SECONDS + self.seconds_a_draft * float(depths.mean()) + 0.0001 * self.prompt_tokens
        seconds += self.fixed_seconds * bool(depths.any())
        self.seconds += seconds
        self.policy.observe_step(
            timed(
                len(self.rows),
                seconds,
                num_asked=int(asked.sum()),
                num_accepted=int(accepted.sum()),
                num_proposals=self._num_ready,
                num_prompt_tokens=self.prompt_tokens,
            )
        )
        return depths

    def run(self, num_steps: int) -> np.ndarray:
        return np.stack([self.step() for _ in range(num_steps)])


def timed(num_decodes: int, seconds: float, **changes: int) -> TimedStep:
    step = {"num_prompt_tokens": 0, "num_asked": 0, "num_accepted": 0, "num_proposals": 0}
    return TimedStep(num_decodes=num_decodes, seconds=seconds, clock_seconds=seconds, **(step | changes))


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


def trials_of(engine: Engine, num_steps: int) -> IntArray:
    """Steps before those that begin to draft again."""
    return np.flatnonzero(np.diff(engine.run(num_steps)[:, 0].astype(bool).astype(int)) == 1)


def test_a_trial_that_shows_that_drafts_pay_is_followed_at_once() -> None:
    depths = Engine([1.0], seconds_a_draft=0.001).run(TIMINGS + 10)[:, 0]
    assert (depths[depths.argmax() :] == 4).all()


def test_new_sequences_are_weighed_at_once() -> None:
    engine = Engine([1.0], seconds_a_draft=0.001)
    engine.run(100)
    engine.acceptance[:] = 0.0
    while engine.run(8).any():
        pass
    engine.policy.forget(0)
    engine.acceptance[:] = 1.0
    assert engine.run(2).any()


def test_a_trial_asks_for_no_more_than_what_promises_most() -> None:
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
    assert (engine.run(1500)[-20:] == 4).mean() > 0.8, "all steps but those that time plain ones"


def test_a_step_without_drafts_is_timed_again() -> None:
    depths = Engine([1.0], seconds_a_draft=0.001).run(PLAIN_INTERVAL + 20)[:, 0]
    assert (depths[PLAIN_INTERVAL:] == 0).any()


def test_a_row_given_to_another_sequence_starts_from_what_all_have_shown() -> None:
    acceptance, rows = Acceptance(4, 2), np.array([0, 1])
    for _ in range(50):
        acceptance.observe(rows, np.array([2, 2]), np.array([2, 0]))
    acceptance.forget(1)
    assert acceptance.chances(np.arange(4))[1, 0] == pytest.approx(0.5, abs=0.05)
    assert acceptance.chances(np.arange(4))[0, 0] > 0.8


def test_drafts_behind_a_refused_one_were_not_tried() -> None:
    acceptance, rows = Acceptance(1, 3), np.array([0])
    before = acceptance.chances(rows)[0]
    acceptance.observe(rows, np.array([3]), np.array([0]))
    chances = acceptance.chances(rows)[0]
    assert chances[0] < before[0]
    assert chances[1] / chances[0] == pytest.approx(before[1] / before[0])


@pytest.mark.parametrize(("acceptance", "depth"), [(1.0, 4), (0.0, 0)])
def test_what_pays_is_found_although_every_step_has_prompts(acceptance: float, depth: int) -> None:
    engine = Engine([acceptance], seconds_a_draft=0.001)
    engine.prompt_tokens = 500
    depths = engine.run(STEPS_WITH_PROMPTS + 4 * TIMINGS)
    assert depths.max() == 4, "they are tried"
    assert (engine.run(100) == depth).mean() > 0.9


def test_drafts_that_paid_come_back_although_prompts_come_while_plain_steps_are_timed_again() -> None:
    engine = Engine([1.0], seconds_a_draft=0.001)
    engine.run(100)
    while engine.step().any():
        pass
    engine.prompt_tokens = 500
    engine.run(STEPS_WITH_PROMPTS + 4 * TIMINGS)
    assert (engine.run(100) == 4).mean() > 0.9


def test_steps_with_prompts_are_not_compared_with_others() -> None:
    engine = Engine([0.5], seconds_a_draft=0.02)
    engine.run(100)
    for _ in range(5):
        engine.prompt_tokens = 500
        engine.run(50)
        engine.prompt_tokens = 0
        engine.run(1)
    assert not engine.run(16).any(), "believed slower, plain steps would make drafts look cheap"


def test_a_step_without_prompts_is_waited_for_again_once_there_was_one() -> None:
    engine = Engine([1.0], seconds_a_draft=0.001)
    for _ in range(TIMINGS - 1):
        engine.prompt_tokens = 500
        assert not engine.run(STEPS_WITH_PROMPTS - 1).any()
        engine.prompt_tokens = 0
        engine.step()


def test_steps_of_prompts_alone_say_nothing_of_steps_that_decode() -> None:
    policy = DepthPolicy(4, 2)
    for _ in range(2 * STEPS_WITH_PROMPTS):
        policy.observe_step(timed(0, 0.05, num_prompt_tokens=500))
    depths = [Engine([0.6], 0.002, own).run(100) for own in (policy, DepthPolicy(4, 2))]
    assert (depths[0] == depths[1]).all()


def test_where_drafting_at_all_is_what_costs_likely_drafts_are_not_all_that_are_taken() -> None:
    """Half of the requests alone bring less in than drafting costs, once for all."""
    engine = Engine([0.95, 0.95, 0.5, 0.5], seconds_a_draft=0.0004)
    engine.fixed_seconds = 0.006
    depths = engine.run(2000)[-500:].mean(0)
    assert (depths[:2] > 3.5).all()
    assert (depths[2:] > 1).all()


def test_the_same_observations_give_the_same_depths() -> None:
    first, second = Engine([0.6, 0.3], 0.002), Engine([0.6, 0.3], 0.002)
    assert (first.run(300) == second.run(300)).all()


@pytest.mark.parametrize(("draft_seconds", "expected"), [(0.004, 1), (0.0001, 4)])
def test_depth_is_where_tokens_a_second_are_highest(draft_seconds: float, expected: int) -> None:
    chances = np.array([[0.5, 0.25, 0.125, 0.0625]])
    rates = [(1 + chances[0, :depth].sum()) / (0.010 + draft_seconds * depth) for depth in range(5)]
    depths, gain = best_depths(chances, lambda depths: 0.010 + draft_seconds * depths)
    assert depths.tolist() == [expected] == [int(np.argmax(rates))]
    assert gain == pytest.approx(max(rates) / rates[0])


def test_one_slow_step_of_many_changes_nothing() -> None:
    engine, other = (Engine([0.9], seconds_a_draft=0.001) for _ in range(2))
    for one in (engine, other):
        one.run(50)
    engine.policy.observe_step(timed(1, 9.0, num_asked=4, num_proposals=4))
    assert (engine.run(50) == other.run(50)).all()


def test_drafts_are_tried_again_ever_more_rarely_where_they_do_not_pay() -> None:
    waits = np.diff(trials_of(Engine([0.0], seconds_a_draft=0.05), 12_000))
    assert waits[0] < 3 * FEWEST_STEPS_BETWEEN_TRIALS
    assert (waits[1:] > 1.8 * waits[:-1]).all()


@pytest.mark.parametrize("seconds_a_draft", [0.001, 0.01, 0.05])
def test_what_trying_drafts_again_costs_is_a_small_share_of_the_time(seconds_a_draft: float) -> None:
    engine = Engine([0.0], seconds_a_draft)
    engine.run(1000)
    engine.seconds = 0.0
    engine.run(10_000)
    assert engine.seconds < 1.01 * 10_000 * PLAIN_SECONDS


def test_a_trial_ends_although_no_step_has_room_for_drafts() -> None:
    policy, rows = DepthPolicy(4, 2), np.arange(2)
    for _ in range(TIMINGS):
        policy.observe_step(timed(2, 0.01))
    num_drafted = 0
    for _ in range(FEWEST_STEPS_BETWEEN_TRIALS):
        depth = int(policy.depths(rows).max())
        num_drafted += depth > 0
        policy.observe_step(timed(2, 0.02, num_proposals=depth))
    assert num_drafted == TRIAL_STEPS


def test_a_step_that_warms_up_says_nothing() -> None:
    engine, other = (Engine([1.0], seconds_a_draft=0.001) for _ in range(2))
    for one in (engine, other):
        one.run(200)
    slow = timed(1, 9.0, num_asked=4, num_proposals=4, num_prompt_tokens=9)
    for step in (slow, replace(slow, num_prompt_tokens=0), replace(slow, num_asked=0, num_proposals=0)):
        engine.policy.observe_step(replace(step, is_warming_up=True))
    assert (engine.run(400) == other.run(400)).all()
    assert (engine.run(50) == 4).mean() > 0.9
