"""How many drafts each request asks for: as many as bring the most expected tokens a second, none where none pay.

Two things are observed, without clock or chance: how often drafts hold, and what steps take by the drafts that they
verify. Drafts count as asked for by the plan, found or not: a proposer that finds few then has a low acceptance and a
low cost. Where nobody drafts the proposer is not even shown the steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.scheduling.step import TimedStep

IntArray = NDArray[np.integer]
FloatArray = NDArray[np.float64]
Depths = NDArray[np.int64]

NUM_BINS = 32
"""Drafts are taken or left by their chance to hold, in steps of 1 / NUM_BINS."""
LEAST_GAIN, LEAST_HOPE = 1.02, 0.9
"""Drafts must promise so many times what none bring; and so many for a trial to go on once they are timed."""
FIRST_TRIES, FIRST_ACCEPTANCE = 2.0, 0.7
"""Believed of every draft before anything is known: high enough to try."""
PRIOR_TRIES = 4.0
"""What is known of all requests counts as so many tries of each."""
KEPT, KEPT_OF_ALL = 0.9, 0.99
"""Of a request's tries at each further try, and of all requests' tries."""
KEPT_IDLE = 0.995
"""Of the tries of a request that gets no drafts beside others that do: it is tried again."""
TIMINGS = 3
"""Of plain steps, after which their time is believed."""
LEAST_WEIGHT = 0.1
"""Of the latest step in the average time of those like it."""
PLAIN_INTERVAL = 128
"""Steps with drafts after which those without are timed again."""
TRIAL_STEPS = TIMINGS + 2
"""The first makes drafts and has none to verify."""
FEWEST_STEPS_BETWEEN_TRIALS, MOST_STEPS_BETWEEN_TRIALS = 128, 1 << 14
"""Without drafts; doubled until they pay."""
STEPS_WITH_PROMPTS = 16
"""In a row, after which no others are waited for: they differ too much to be compared with the rest."""


class Acceptance:
    """Of each row and draft, the chance that it holds where those before it do: an average that leans on all rows'."""

    def __init__(self, num_rows: int, max_depth: int) -> None:
        self._tries, self._held = np.zeros((2, num_rows, max_depth))
        self._all_tries = np.full(max_depth, FIRST_TRIES)
        self._all_held = FIRST_ACCEPTANCE * self._all_tries
        self._places = np.arange(max_depth)

    def chances(self, rows: IntArray) -> FloatArray:
        """That a draft and all before it hold [num_rows, max_depth]."""
        prior = PRIOR_TRIES * self._all_held / self._all_tries
        each: FloatArray = (self._held[rows] + prior) / (self._tries[rows] + PRIOR_TRIES)
        return each.cumprod(-1)

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        """Of each row, how many drafts were to be verified and how many of them held."""
        held = self._places < num_accepted[:, None]
        tried = (self._places < num_asked[:, None]) & (self._places <= num_accepted[:, None])
        kept = np.where(tried, KEPT, np.where(num_asked[:, None] == 0, KEPT_IDLE, 1.0))
        self._tries[rows] = self._tries[rows] * kept + tried
        self._held[rows] = self._held[rows] * kept + held
        num_tried = tried.sum(0)
        kept_of_all = np.where(num_tried, KEPT_OF_ALL, 1.0)
        self._all_tries = self._all_tries * kept_of_all + (num_tried > 0)
        self._all_held = self._all_held * kept_of_all + held.sum(0) / np.maximum(num_tried, 1)

    def forget(self, row: int) -> None:
        self._tries[row] = self._held[row] = 0.0


class CostTable:
    """What steps take by the drafts that they verify a request, rounded; those of a step that drafts at all to 1 at
    least. A step without drafts does no drafting work at all, so that the difference is the whole cost."""

    def __init__(self, max_depth: int) -> None:
        self._seconds = np.zeros(1 + max_depth)  # 0: never timed
        self._num_timed = np.zeros(1 + max_depth, np.int64)
        self.has_timed_drafts = False
        self.is_drafting_old = False
        """What is known of drafts is believed until the next of their steps, and forgotten then."""

    @property
    def plain_seconds(self) -> float:
        return float(self._seconds[0])

    @property
    def is_plain_known(self) -> bool:
        return bool(self._num_timed[0] >= TIMINGS)

    def add(self, depth: float, seconds: float) -> None:
        """A step that verified `depth` drafts a request on average took so long; a slow one counts as twice the average
        at most."""
        place = max(1, round(depth)) if depth else 0
        if place and self.is_drafting_old:
            self._seconds[1:], self._num_timed[1:], self.is_drafting_old = 0.0, 0, False
        self.has_timed_drafts |= place > 0
        self._num_timed[place] += 1
        believed, weight = self._seconds[place] or seconds, max(1 / self._num_timed[place], LEAST_WEIGHT)
        self._seconds[place] = believed + weight * (min(seconds, 2 * believed) - believed)

    def time_plain_anew(self) -> None:
        """All that was known counts as one step of those that are believed again."""
        self._num_timed[0] = 1

    def seconds(self, depths: FloatArray) -> FloatArray:
        """Of steps that verify so many drafts a request on average. Between depths that were timed along a line, beyond
        them as if drafting at all cost as much as a draft; no shallower step takes longer than a deeper one."""
        known, at = 1 + np.flatnonzero(self._seconds[1:]), np.maximum(depths, 1.0)
        extra = np.minimum.accumulate(self._seconds[known][::-1])[::-1] - self.plain_seconds
        scale = (1 + at) / (1 + at.clip(known[0], known[-1]))
        return self.plain_seconds + np.where(depths > 0, np.interp(at, known, np.maximum(extra, 0.0)) * scale, 0.0)


@dataclass(slots=True)
class _Batch:
    """Batches of about one size, and what is done about drafts there."""

    costs: CostTable
    num_drafting: int = 0
    """Steps since those without drafts were timed."""
    num_plain: int = FEWEST_STEPS_BETWEEN_TRIALS
    """Steps since one with them."""
    steps_between_trials: int = FEWEST_STEPS_BETWEEN_TRIALS
    trial_steps: int = 0
    """Left, in which drafts are asked for although they promise nothing."""
    is_resting: bool = True
    """They were weighed and did not pay, and nothing has changed."""

    @property
    def may_draft(self) -> bool:
        return self.costs.is_plain_known and (self.trial_steps > 0 or not self.is_resting)

    def depths(self, chances: FloatArray) -> Depths:
        """Where it may draft."""
        if not self.costs.has_timed_drafts:
            return np.full(len(chances), chances.shape[1])
        depths, gain = best_depths(chances, self.costs)
        if gain >= LEAST_GAIN:
            self.is_resting, self.steps_between_trials = False, FEWEST_STEPS_BETWEEN_TRIALS
            return depths
        if self.trial_steps and (gain >= LEAST_HOPE or self.costs.is_drafting_old):
            return np.maximum(depths, 1)
        self.is_resting, self.trial_steps = True, 0
        return np.zeros(len(chances), np.int64)

    def observe(self, step: TimedStep, *, is_comparable: bool) -> None:
        is_plain = not (step.num_asked or step.num_proposals)
        if is_comparable and (is_plain or (step.num_asked and step.num_proposals)):  # else it begins or ends drafting
            self.costs.add(step.num_asked / step.num_decodes, step.seconds)
        if is_plain:
            self.num_plain += 1
            if self.num_plain >= self.steps_between_trials and is_comparable and self.costs.is_plain_known:
                self.trial_steps, self.num_plain, self.costs.is_drafting_old = TRIAL_STEPS, 0, True
                self.steps_between_trials = min(2 * self.steps_between_trials, MOST_STEPS_BETWEEN_TRIALS)
            return
        self.num_plain, self.trial_steps = 0, max(0, self.trial_steps - 1)
        self.num_drafting += 1
        if self.num_drafting >= PLAIN_INTERVAL:
            self.num_drafting = 0
            self.costs.time_plain_anew()


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
        return batch.depths(self._acceptance.chances(rows)) if batch.may_draft else np.zeros(len(rows), np.int64)

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
            batch.is_resting = not batch.costs.has_timed_drafts

    def _batch(self, num_requests: int) -> _Batch:
        kind = ((num_requests - 1).bit_length(), self._num_with_prompts >= STEPS_WITH_PROMPTS)
        if kind not in self._batches:
            self._batches[kind] = _Batch(CostTable(self.max_depth))
        return self._batches[kind]


def best_depths(chances: FloatArray, costs: CostTable) -> tuple[Depths, float]:
    """Depth [num_requests] of each request, given `chances` [num_requests, max_depth] that it and all before it hold;
    and how many times as many tokens a second as without drafts that promises.

    Drafts are taken from the likeliest down, to where expected tokens a second are highest.
    """
    num_requests = len(chances)
    bins = (chances * NUM_BINS).astype(np.intp)
    flat = bins.ravel()
    num_taken = np.bincount(flat, minlength=NUM_BINS + 1)[::-1].cumsum()
    num_held = np.bincount(flat, chances.ravel(), minlength=NUM_BINS + 1)[::-1].cumsum()
    rates = (num_requests + num_held) / costs.seconds(num_taken / num_requests)
    best = int(rates.argmax())
    depths: Depths = np.count_nonzero(bins >= NUM_BINS - best, axis=1)
    return depths, float(rates[best]) * costs.plain_seconds / num_requests


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
