"""How many drafts each request asks for: as many as bring the most expected tokens a second, none where none pay.

It is a function of two things that are observed (`draft_averages`), without clock or chance: how often drafts hold, and
what steps take by their drafts. Drafts count as asked for by the plan, found or not: a proposer that finds few then has
a low acceptance and a low cost. Where nobody drafts the proposer is not even shown the steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.scheduling.step import TimedStep
from kvasir_runtime.speculative.draft_averages import TIMINGS, Acceptance, CostTable, FloatArray, IntArray

Depths = NDArray[np.int64]

NUM_BINS = 32
"""Drafts are taken or left by their chance to hold, in steps of 1 / NUM_BINS."""
LEAST_GAIN = 1.02
"""Drafts must promise so much more than none."""
REST_STEPS = 16
"""Where no draft pays, steps after which they are weighed again; at once when the sequences change."""
PLAIN_INTERVAL = 128
"""Steps with drafts after which one without is timed again."""
TRIAL_STEPS = TIMINGS + 2
"""The first makes drafts and has none to verify."""
FEWEST_STEPS_BETWEEN_TRIALS, MOST_STEPS_BETWEEN_TRIALS = 128, 1 << 14
"""Without drafts; doubled until they pay."""
STEPS_WITH_PROMPTS = 16
"""In a row, after which no others are waited for: they differ too much to be compared with the rest."""


@dataclass(slots=True)
class _Batch:
    """Batches of about one size, and what is done about drafts there."""

    costs: CostTable
    num_drafting: int = 0
    """Steps since one without drafts."""
    num_plain: int = FEWEST_STEPS_BETWEEN_TRIALS
    """Steps since one with them."""
    steps_between_trials: int = FEWEST_STEPS_BETWEEN_TRIALS
    trial_steps: int = 0
    """Left, in which drafts are asked for whatever they promise."""
    rest_steps: int = 0
    """Left, in which none are."""

    @property
    def can_draft(self) -> bool:
        if not self.costs.is_plain_known:
            return False
        is_resting = self.rest_steps or self.num_drafting >= PLAIN_INTERVAL or not self.costs.is_drafting_known
        return self.trial_steps > 0 or not is_resting

    def observe(self, step: TimedStep, *, is_comparable: bool) -> None:
        is_plain = not (step.num_asked or step.num_proposals)
        if is_comparable and (is_plain or (step.num_asked and step.num_proposals)):  # else it begins or ends drafting
            self.costs.add(step.num_asked / step.num_decodes, step.seconds)
        if not is_plain:
            self.num_drafting, self.num_plain = self.num_drafting + 1, 0
            self.trial_steps = max(0, self.trial_steps - 1)
            return
        self.num_drafting, self.num_plain = 0, self.num_plain + 1
        self.rest_steps = max(0, self.rest_steps - 1)
        if self.num_plain >= self.steps_between_trials and is_comparable and self.costs.is_plain_known:
            self.costs.time_drafts_anew()
            self.trial_steps, self.num_plain = TRIAL_STEPS, 0
            self.steps_between_trials = min(2 * self.steps_between_trials, MOST_STEPS_BETWEEN_TRIALS)


class DepthPolicy:
    """Called by the scheduler: `depths` when it plans, the other methods when a step's result is there."""

    def __init__(self, max_num_seqs: int, max_depth: int) -> None:
        self.max_depth = max_depth
        self._acceptance = Acceptance(max_num_seqs, max_depth)
        self._batches: dict[tuple[int, bool], _Batch] = {}
        """By bit length of the number of requests, of steps with prompts and without."""
        self._num_with_prompts = 0
        """Steps in a row."""

    def depths(self, rows: IntArray) -> Depths:
        """Drafts to ask for [num_requests]."""
        batch = self._batch(len(rows))
        if not batch.can_draft:
            return np.zeros(len(rows), np.int64)
        if not batch.costs.is_drafting_known:
            return np.full(len(rows), self.max_depth)
        if batch.num_plain:
            self._acceptance.fade(rows, batch.num_plain)
        chances = self._acceptance.chances(rows)
        if batch.trial_steps:
            return np.maximum(best_depths(chances, batch.costs, least_gain=0.0), 1)
        depths = best_depths(chances, batch.costs)
        if depths.any():
            batch.steps_between_trials = FEWEST_STEPS_BETWEEN_TRIALS
        else:
            batch.rest_steps = REST_STEPS
        return depths

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        """Of each request of a step with drafts, how many the plan asked for and how many of them held (the token drawn
        after them not counted)."""
        self._acceptance.observe(rows, num_asked, num_accepted)

    def observe_step(self, step: TimedStep) -> None:
        if step.is_warming_up or not step.num_decodes:
            return  # it says nothing of those to come
        self._num_with_prompts = self._num_with_prompts + 1 if step.num_prompt_tokens else 0
        is_comparable = not step.num_prompt_tokens or self._num_with_prompts >= STEPS_WITH_PROMPTS
        self._batch(step.num_decodes).observe(step, is_comparable=is_comparable)

    def forget(self, row: int) -> None:
        """Another sequence takes the row."""
        self._acceptance.forget(row)
        for batch in self._batches.values():
            batch.rest_steps = 0

    def _batch(self, num_requests: int) -> _Batch:
        kind = ((num_requests - 1).bit_length(), self._num_with_prompts >= STEPS_WITH_PROMPTS)
        if kind not in self._batches:
            self._batches[kind] = _Batch(CostTable(self.max_depth))
        return self._batches[kind]


def best_depths(chances: FloatArray, costs: CostTable, least_gain: float = LEAST_GAIN) -> Depths:
    """Depth [num_requests] of each request, given `chances` [num_requests, max_depth] that it and all before it hold.

    Drafts are taken from the likeliest down, to where expected tokens a second are highest.
    """
    num_requests = len(chances)
    bins = (chances * NUM_BINS).astype(np.intp)
    flat = bins.ravel()
    num_taken = np.bincount(flat, minlength=NUM_BINS + 1)[::-1].cumsum()
    num_held = np.bincount(flat, chances.ravel(), minlength=NUM_BINS + 1)[::-1].cumsum()
    rates = (num_requests + num_held) / costs.seconds(num_taken / num_requests)
    best = int(rates.argmax())
    if rates[best] < least_gain * num_requests / costs.plain_seconds:
        return np.zeros(num_requests, np.int64)
    depths: Depths = np.count_nonzero(bins >= NUM_BINS - best, axis=1)
    return depths


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always as many drafts, whether they pay or not."""

    max_depth: int

    def depths(self, rows: IntArray) -> Depths:
        return np.full(len(rows), self.max_depth)

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        """Nothing is learned."""

    def observe_step(self, step: TimedStep) -> None:
        """Nothing is learned."""

    def forget(self, row: int) -> None:
        """Nothing is known of it."""
