"""Adaptive depth: what pays is drafted, what does not is left, and what was left is tried again."""

import sys
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest

from kvasir_runtime.scheduling.step import TimedStep
from kvasir_runtime.speculative.acceptance import Acceptance
from kvasir_runtime.speculative.depth import REVIEW_STEPS, STEPS_WITH_PROMPTS, DepthPolicy, IntArray, best_depths
from kvasir_runtime.speculative.step_cost import (
    FEWEST_STEPS_BETWEEN_PROBES,
    MOST_CHARGED,
    MOST_LOST,
    MOST_PROBE_PLANS,
    MOST_SAVED,
    MOST_STEPS_TO_SECOND_PROBE,
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
        self.fixed_seconds = 0.0
        self.prompt_tokens = 0
        self.proposer_seconds = 0.0
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
                proposer_seconds=self.proposer_seconds,
            )
        )
        return depths

    def run(self, num_steps: int) -> np.ndarray:
        return np.stack([self.step() for _ in range(num_steps)])


def timed(num_decodes: int, seconds: float, **changes: int | float) -> TimedStep:
    step = {"num_prompt_tokens": 0, "num_asked": 0, "num_accepted": 0, "num_proposals": 0, "proposer_seconds": 0.0}
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


def probes_of(engine: Engine, num_steps: int) -> IntArray:
    """Steps before those that begin to draft again."""
    return np.flatnonzero(np.diff(engine.run(num_steps)[:, 0].astype(bool).astype(int)) == 1)


def test_drafts_are_tried_again_ever_more_rarely_where_they_do_not_pay() -> None:
    """Here a probe costs more than is paid back meanwhile."""
    waits = np.diff(probes_of(Engine([0.0], seconds_a_draft=0.05), 12_000))
    assert MOST_STEPS_TO_SECOND_PROBE <= waits[0] < 1.2 * MOST_STEPS_TO_SECOND_PROBE
    assert waits[1] > 1.4 * waits[0]


def test_a_cheap_probe_is_made_again_once_it_is_paid_back() -> None:
    """Four proposals of one draft, each a hundredth of a plain step: eight steps at PROBE_SHARE."""
    waits = np.diff(probes_of(Engine([0.0], seconds_a_draft=0.0001), 4000))
    assert (waits < 1.2 * FEWEST_STEPS_BETWEEN_PROBES).all()
    assert len(waits) > 10


def plain_cost(num_steps: int = 10) -> BatchCost:
    cost = BatchCost()
    for _ in range(num_steps):
        cost.observe(timed(1, PLAIN_SECONDS))
    return cost


def test_everything_that_drafting_takes_is_owed_and_what_it_brings_is_credited() -> None:
    cost = plain_cost()
    cost.observe(replace(timed(1, 0.030, num_proposals=2), is_catching_up=True))  # two plain steps more
    cost.observe(timed(1, 0.020, num_asked=2, num_accepted=1))  # two tokens in the time of two
    assert cost.owed == pytest.approx(2.0)
    cost.observe(timed(2, 0.020, num_asked=4, num_accepted=1, num_proposals=2), prompt_seconds=0.005)
    assert cost.owed == pytest.approx(3.0), "2.5 steps' time for 1.5 tokens a request"


def test_one_slow_step_is_not_charged_in_full() -> None:
    cost = plain_cost()
    for _ in range(PROBE_STEPS):
        cost.observe(timed(1, 0.020, num_asked=1, num_accepted=1, num_proposals=1))
    cost.observe(timed(1, 9.9, num_asked=1, num_accepted=1, num_proposals=1))
    assert cost.owed == pytest.approx(2.0), "twice the two plain steps that such a step takes, for two tokens"


def test_the_first_steps_that_draft_may_wait_for_a_capture() -> None:
    cost = plain_cost()
    cost.observe(timed(1, 9.9, num_asked=1, num_accepted=1, num_proposals=1))
    assert cost.owed == pytest.approx(MOST_CHARGED - 2)


def test_catching_up_is_charged_in_full() -> None:
    cost = plain_cost()
    for _ in range(PROBE_STEPS):
        cost.observe(timed(1, 0.020, num_asked=1, num_accepted=1, num_proposals=1))
    cost.observe(replace(timed(1, 0.500, num_proposals=1), is_catching_up=True))
    assert cost.owed == pytest.approx(49.0)


def test_steps_without_drafts_pay_back_what_is_owed_and_no_more() -> None:
    cost = plain_cost()
    cost.observe(timed(1, 0.020, num_proposals=1))
    for _ in range(50):
        cost.observe(timed(1, PLAIN_SECONDS))
    assert cost.owed == pytest.approx(1 - 50 * PROBE_SHARE)
    for _ in range(round(1 / PROBE_SHARE) - 50 + 1):
        cost.observe(timed(1, PLAIN_SECONDS))
    assert cost.owed == 0.0


def test_what_drafts_gain_is_saved_up_to_a_limit_and_kept_by_plain_steps() -> None:
    cost = plain_cost()
    for _ in range(100):
        cost.observe(timed(1, 0.011, num_asked=4, num_accepted=4, num_proposals=4))
    cost.observe(timed(1, PLAIN_SECONDS))
    assert cost.owed == -MOST_SAVED


def test_drafts_are_trusted_until_they_have_lost_too_much() -> None:
    cost = plain_cost()
    cost.owed = 3.0
    cost.note_choice(drafts_paid=False, drafts_pay=True)
    cost.owed = 3.0 + MOST_LOST
    assert cost.may_draft(drafts_pay=True)
    cost.owed += 0.01
    assert not cost.may_draft(drafts_pay=True)


def test_a_probe_whose_promise_was_not_kept_counts_as_failed() -> None:
    cost = plain_cost()
    for _ in range(2):
        cost.begin_probe()
        for _ in range(PROBE_STEPS):
            cost.observe(timed(1, PLAIN_SECONDS, num_asked=1, num_accepted=1, num_proposals=1))
        cost.owed = 100.0
        cost.note_choice(drafts_paid=False, drafts_pay=True)
        cost.note_choice(drafts_paid=True, drafts_pay=False)
    num_steps = 0
    while not cost.is_probe_due:
        cost.observe(timed(1, PLAIN_SECONDS))
        num_steps += 1
    assert num_steps == 2 * MOST_STEPS_TO_SECOND_PROBE


def test_drafts_that_were_left_are_trusted_again_once_nothing_is_owed_or_a_probe_has_ended() -> None:
    cost = plain_cost()
    cost.owed = 0.01
    assert not cost.may_draft(drafts_pay=False)
    cost.has_probed = True
    assert cost.may_draft(drafts_pay=False)
    cost.note_choice(drafts_paid=False, drafts_pay=False)
    assert not cost.may_draft(drafts_pay=False)
    cost.owed = 0.0
    assert cost.may_draft(drafts_pay=False)


def test_a_proposer_that_only_ever_catches_up_is_left() -> None:
    """Such steps are not timed, so that by what is believed drafts go on to pay."""
    policy, rows = DepthPolicy(2, 4), np.arange(2)
    num_drafted = 0
    for step in range(500):
        depth = int(policy.depths(rows).max())
        num_drafted += depth > 0
        timing = timed(2, PLAIN_SECONDS * (2 if depth else 1), num_proposals=depth)
        is_caught_up = step < 40
        policy.observe_step(
            replace(timing, num_asked=2 * depth, num_accepted=2 * depth * is_caught_up, is_catching_up=not is_caught_up)
        )
    assert 30 < num_drafted < 42 + MOST_SAVED + MOST_LOST


def test_a_probe_that_shows_that_drafts_pay_is_followed_at_once() -> None:
    depths = Engine([1.0], seconds_a_draft=0.001).run(PROBE_STEPS + 10)[:, 0]
    assert (depths[depths.argmax() :] == 4).all()


@pytest.mark.parametrize("seconds_a_draft", [0.001, 0.01, 0.05])
def test_what_trying_drafts_again_costs_is_a_small_share_of_the_time(seconds_a_draft: float) -> None:
    engine = Engine([0.0], seconds_a_draft)
    engine.run(1000)
    engine.seconds = 0.0
    engine.run(10_000)
    assert engine.seconds < (1 + 1.5 * PROBE_SHARE) * 10_000 * PLAIN_SECONDS


def test_where_drafts_do_not_pay_nothing_is_weighed_between_reviews() -> None:
    engine = Engine([0.0] * 8, seconds_a_draft=0.02)
    engine.run(100)
    num_weighed = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_weighed
        num_weighed += event == "call" and frame.f_code is BatchCost.note_choice.__code__

    sys.setprofile(count)
    try:
        engine.run(10 * REVIEW_STEPS)
    finally:
        sys.setprofile(None)
    assert 8 <= num_weighed <= 12


def test_new_sequences_are_weighed_at_once() -> None:
    engine = Engine([1.0], seconds_a_draft=0.001)
    engine.run(100)
    engine.acceptance[:] = 0.0
    while engine.run(REVIEW_STEPS // 2).any():
        pass
    engine.policy.forget(0)
    engine.acceptance[:] = 1.0
    assert engine.run(2).any()


def test_another_batch_size_begins_with_what_the_nearest_has_measured() -> None:
    small = Engine([0.3, 0.3], seconds_a_draft=0.02)
    small.run(200)
    assert not Engine([0.3] * 8, 0.02, small.policy).run(FEWEST_STEPS_BETWEEN_PROBES).any()


def test_another_batch_size_owes_the_nearest_ones_probe_before_its_first() -> None:
    """Three steps with drafts and one that begins them, of up to nine plain steps' time each."""
    small = Engine([0.3, 0.3], seconds_a_draft=0.02)
    small.run(20)
    first = probes_of(Engine([0.3] * 8, 0.02, small.policy), 2000)[0]
    assert 2 * FEWEST_STEPS_BETWEEN_PROBES < first <= MOST_STEPS_TO_SECOND_PROBE + 2 * REVIEW_STEPS


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
    assert (engine.run(1500)[-20:] == 4).mean() > 0.8, "all steps but those that time plain ones"


def test_a_step_without_drafts_is_timed_again() -> None:
    depths = Engine([1.0], seconds_a_draft=0.001).run(PLAIN_INTERVAL + 20)[:, 0]
    assert (depths[PLAIN_INTERVAL:] == 0).any()


def test_a_row_given_to_another_sequence_starts_from_what_all_have_shown() -> None:
    acceptance, rows = Acceptance(4, 2), np.array([0, 1])
    for _ in range(50):
        acceptance.observe(rows, np.array([2, 2]), np.array([2, 0]))
    acceptance.forget(1)
    assert acceptance.chances[1, 0] == pytest.approx(0.5, abs=0.05)
    assert acceptance.chances[0, 0] > 0.8


def test_drafts_behind_a_refused_one_were_not_tried() -> None:
    acceptance = Acceptance(1, 3)
    before = acceptance.chances[0].copy()
    acceptance.observe(np.array([0]), np.array([3]), np.array([0]))
    chances = acceptance.chances[0]
    assert chances[0] < before[0]
    assert chances[1] / chances[0] == pytest.approx(before[1] / before[0])


def test_steps_that_only_begin_or_end_drafting_are_not_timed() -> None:
    cost = BatchCost()
    cost.observe(timed(1, 99.0, num_proposals=2))
    cost.observe(timed(1, 99.0, num_asked=2))
    assert (cost.plain.num_samples, cost.drafted.num_samples) == (0, 0)


@pytest.mark.parametrize(("acceptance", "depth"), [(1.0, 4), (0.0, 0)])
def test_what_pays_is_found_although_every_step_has_prompts(acceptance: float, depth: int) -> None:
    engine = Engine([acceptance], seconds_a_draft=0.001)
    engine.prompt_tokens = 500
    depths = engine.run(STEPS_WITH_PROMPTS + 4 * PROBE_STEPS)
    assert depths.max() == 4, "they are tried"
    assert (engine.run(100) == depth).mean() > 0.9


def test_drafts_that_paid_come_back_although_prompts_come_while_plain_steps_are_timed_again() -> None:
    engine = Engine([1.0], seconds_a_draft=0.001)
    engine.run(100)
    while engine.step().any():
        pass
    engine.prompt_tokens = 500
    engine.run(STEPS_WITH_PROMPTS + 4 * PROBE_STEPS)
    assert (engine.run(100) == 4).mean() > 0.9


def test_steps_with_prompts_bear_what_these_cost_the_proposer_once() -> None:
    engine = Engine([1.0], seconds_a_draft=0.001)
    engine.prompt_tokens, engine.proposer_seconds = 500, 100 * PLAIN_SECONDS  # however much of the step's time it is
    engine.run(100)
    assert (engine.run(100) == 4).mean() > 0.9


def test_steps_with_prompts_are_not_compared_with_others() -> None:
    engine = Engine([0.5], seconds_a_draft=0.02)
    engine.run(100)
    for _ in range(5):
        engine.prompt_tokens = 500
        engine.run(50)
        engine.prompt_tokens = 0
        engine.run(1)
    assert not engine.run(REVIEW_STEPS).any(), "believed slower, plain steps would make drafts look cheap"


def test_a_step_without_prompts_is_waited_for_again_once_there_was_one() -> None:
    engine = Engine([1.0], seconds_a_draft=0.001)
    for _ in range(PROBE_STEPS - 1):
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


def test_a_probe_ends_although_no_step_has_room_for_drafts() -> None:
    policy, rows = DepthPolicy(4, 2), np.arange(2)
    num_drafted = 0
    for _ in range(200):
        depth = int(policy.depths(rows).max())
        num_drafted += depth > 0
        policy.observe_step(timed(2, 0.02, num_prompt_tokens=9, num_proposals=depth))
    assert num_drafted == MOST_PROBE_PLANS


def test_looking_at_a_batch_neither_counts_a_step_nor_uses_up_a_probe() -> None:
    policy, rows = DepthPolicy(4, 2), np.arange(2)
    for _ in range(PROBE_STEPS):
        policy.observe_step(timed(2, 0.01))
    assert policy.most_depth(rows) == 0, "a probe is begun by a step that is planned"
    assert policy.depths(rows).tolist() == [2, 2]
    for _ in range(MOST_PROBE_PLANS):
        assert policy.most_depth(rows) == 2
    assert sum(policy.depths(rows).any() for _ in range(MOST_PROBE_PLANS)) == MOST_PROBE_PLANS - 1


@pytest.mark.parametrize(("acceptance", "depth"), [(1.0, 4), (0.0, 0)])
def test_a_look_finds_what_pays_and_leaves_reviews_as_they_were(acceptance: float, depth: int) -> None:
    engine, other = (Engine([acceptance], seconds_a_draft=0.001) for _ in range(2))
    for one in (engine, other):
        one.run(100)
        while not (one.step() == depth).all():
            pass
    assert [engine.policy.most_depth(engine.rows) for _ in range(2 * REVIEW_STEPS)] == [depth] * 2 * REVIEW_STEPS
    assert (engine.run(2000) == other.run(2000)).all()


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


def test_each_prompt_is_borne_once_however_long_nothing_was_decoded() -> None:
    """100,000 steps of prompts alone, 0.005 s of each the proposer's."""
    cost, num_steps = PromptCost(), 100_000
    for _ in range(num_steps):
        cost.observe(timed(0, 0.02, num_proposals=2, num_prompt_tokens=500, proposer_seconds=0.005))
    borne = 0.0
    for _ in range(2000):
        borne += cost.seconds_a_step
        cost.observe(timed(1, 0.01))
    assert borne == pytest.approx(num_steps * 0.005, rel=0.01)


def test_drafts_must_bring_in_what_prompts_cost_too() -> None:
    chances = np.array([[0.5]])
    assert best_depths(chances, 0.010, 0.003).tolist() == [1]
    assert best_depths(chances, 0.010, 0.003, fixed_seconds=0.002).tolist() == [0]


def test_where_drafting_at_all_is_what_costs_likely_drafts_are_not_all_that_are_taken() -> None:
    """Half of the requests alone bring less in than drafting costs, once for all."""
    engine = Engine([0.95, 0.95, 0.5, 0.5], seconds_a_draft=0.0004)
    engine.fixed_seconds = 0.006
    depths = engine.run(2000)[-500:].mean(0)
    assert (depths[:2] > 3.5).all()
    assert (depths[2:] > 1.5).all()


@pytest.mark.parametrize(("each", "fixed"), [(0.0, 0.006), (0.002, 0.0), (0.001, 0.003)])
def test_what_a_draft_costs_and_what_drafting_does_is_told_apart_once_depths_differ(each: float, fixed: float) -> None:
    cost = BatchCost()
    for _ in range(PROBE_STEPS):
        cost.observe(timed(1, 0.010))
    for number in range(400):
        depth = 1 + number % 4
        cost.observe(timed(1, 0.010 + fixed + each * depth, num_asked=depth, num_proposals=4))
    assert cost.draft_seconds == pytest.approx(each, abs=0.0002)
    assert cost.fixed_seconds == pytest.approx(fixed, abs=0.0008)  # the believed step is one of the faster


def test_until_depths_differ_drafting_at_all_is_taken_to_cost_as_much_as_a_draft() -> None:
    cost = BatchCost()
    for _ in range(PROBE_STEPS):
        cost.observe(timed(1, 0.010))
        cost.observe(timed(1, 0.015, num_asked=4, num_proposals=4))
    assert (cost.draft_seconds, cost.fixed_seconds) == pytest.approx((0.001, 0.001))


def test_a_step_that_warms_up_says_nothing() -> None:
    engine, other = (Engine([1.0], seconds_a_draft=0.001) for _ in range(2))
    for one in (engine, other):
        one.run(200)
    slow = timed(1, 9.0, num_asked=4, num_proposals=4, num_prompt_tokens=9, proposer_seconds=9.0)
    for step in (slow, replace(slow, num_prompt_tokens=0), replace(slow, num_asked=0, num_proposals=0)):
        engine.policy.observe_step(replace(step, is_warming_up=True))
    assert (engine.run(400) == other.run(400)).all()
    assert (engine.run(50) == 4).mean() > 0.9


def test_the_same_observations_give_the_same_depths() -> None:
    first, second = Engine([0.6, 0.3], 0.002), Engine([0.6, 0.3], 0.002)
    assert (first.run(300) == second.run(300)).all()


def test_the_believed_time_of_a_step_leans_on_the_faster_ones() -> None:
    believed = StepSeconds()
    for seconds in [0.004, 0.008] * 50:  # every other step waits for other work
        believed.add(seconds)
    assert believed.mean < 0.005
