"""How many drafts each request asks for: as many as bring the most expected tokens a second, none where none pay.

Two things are observed, without clock or chance: how often drafts hold, and what steps take by the drafts that they
verify. Drafts count as asked for by the plan, found or not: a proposer that finds few then has a low acceptance and a
low cost. Where nobody drafts the proposer is not even shown the steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.scheduling.step import TimedStep

IntArray = NDArray[np.integer]
FloatArray = NDArray[np.float64]
Depths = NDArray[np.int64]

LEAST_GAIN = 1.02
"""Drafts must promise so many times the tokens that none bring."""
FIRST_TRIES, FIRST_ACCEPTANCE = 2, 0.7
"""Believed of every draft before anything is known: high enough to try."""
LEAST_WEIGHT_OF_ALL = 0.01
"""Of the latest step in what is believed of new requests."""
PRIOR_TRIES = 4.0
"""That belief counts as so many tries of each request."""
KEPT, KEPT_IDLE = 0.9, 0.995
"""Of a draft's tries, in a step that tries it again, and in one that does not."""
LEAST_WEIGHT = 0.1
"""Of the latest step in the average time of those like it."""
TIMINGS = 3
"""Of plain steps, after which their time is believed."""
PLAIN_INTERVAL = 128
"""Steps with drafts after which those without are timed again."""
TRIAL_STEPS = TIMINGS + 2
"""In which drafts are asked for although they promise nothing. The first makes some and has none to verify."""
FEWEST_STEPS_BETWEEN_TRIALS, MOST_STEPS_BETWEEN_TRIALS = 128, 1 << 14
"""Without drafts; doubled until they pay."""
STEPS_WITH_PROMPTS = 16
"""In a row, after which no others are waited for: they differ too much to be compared with the rest."""


class Acceptance:
    """Of each row and draft, the chance that it holds where those before it do: an average that leans on all rows'."""

    def __init__(self, num_rows: int, max_depth: int) -> None:
        self._tries, self._held = np.zeros((2, num_rows, max_depth))
        self._of_all = np.full(max_depth, FIRST_ACCEPTANCE)
        self._num_steps = FIRST_TRIES

    def chances(self, rows: IntArray) -> FloatArray:
        """That a draft and all before it hold [num_rows, max_depth]."""
        each: FloatArray = (self._held[rows] + PRIOR_TRIES * self._of_all) / (self._tries[rows] + PRIOR_TRIES)
        return each.cumprod(-1)

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        places = np.arange(len(self._of_all))
        held = places < num_accepted[:, None]
        tried = (places < num_asked[:, None]) & (places <= num_accepted[:, None])
        kept = np.where(tried, KEPT, KEPT_IDLE)
        self._tries[rows] = self._tries[rows] * kept + tried
        self._held[rows] = self._held[rows] * kept + held
        num_tried = tried.sum(0)
        change = held.sum(0) / np.maximum(num_tried, 1) - self._of_all
        self._num_steps += 1
        self._of_all += max(1 / self._num_steps, LEAST_WEIGHT_OF_ALL) * change * (num_tried > 0)

    def forget(self, row: int) -> None:
        self._tries[row] = self._held[row] = 0.0


class _Batch:
    """Batches of about one size: what their steps take, and whether drafts are tried there."""

    def __init__(self) -> None:
        self._plain_seconds, self._num_plain_timed = 0.0, 0
        self._draft_seconds, self._num_drafts_timed = 0.0, 0
        """Of a draft a request; to draft at all costs as much again."""
        self._num_plain = self._num_drafting = 0
        """Steps since drafts were made; and since plain steps were timed."""
        self._wait = FEWEST_STEPS_BETWEEN_TRIALS
        self._trial_steps = TRIAL_STEPS  # left

    @property
    def may_draft(self) -> bool:
        return self._num_plain_timed >= TIMINGS and (self._num_drafts_timed > 0 or self._trial_steps > 0)

    def depths(self, chances: FloatArray) -> Depths:
        """Where it may draft."""
        depths, gain = best_depths(chances, self.seconds)
        if gain >= LEAST_GAIN and self._num_drafts_timed:
            self._wait = FEWEST_STEPS_BETWEEN_TRIALS
            return depths
        return np.maximum(depths, 1) if self._trial_steps else np.zeros(len(chances), np.int64)

    def seconds(self, depths: FloatArray) -> FloatArray:
        """Of steps that verify so many drafts a request on average."""
        return self._plain_seconds + max(self._draft_seconds, 0.0) * np.where(depths > 0, 1 + depths, 0.0)

    def observe(self, step: TimedStep, *, is_comparable: bool) -> None:
        if step.num_asked or step.num_proposals:
            if is_comparable and step.num_asked and step.num_proposals:  # else drafting begins or ends
                self._time_drafts(step.num_asked / step.num_decodes, step.seconds)
            self._num_plain, self._trial_steps = 0, max(0, self._trial_steps - 1)
            self._num_drafting += 1
            if self._num_drafting >= PLAIN_INTERVAL:
                self._num_drafting, self._num_plain_timed = 0, 1
        else:
            self._num_plain += 1
            if is_comparable:
                self._time_plain(step.seconds)
            if is_comparable and self._num_plain >= self._wait:
                self._num_plain, self._trial_steps = 0, TRIAL_STEPS
                self._num_drafts_timed = min(1, self._num_drafts_timed)  # what is known counts as one of those to come
                self._wait = min(2 * self._wait, MOST_STEPS_BETWEEN_TRIALS)

    def _time_plain(self, seconds: float) -> None:
        """A slow step counts as twice what is believed at most, here as below."""
        believed, self._num_plain_timed = self._plain_seconds or seconds, self._num_plain_timed + 1
        change = min(seconds, 2 * believed) - believed
        self._plain_seconds = believed + max(1 / self._num_plain_timed, LEAST_WEIGHT) * change

    def _time_drafts(self, depth: float, seconds: float) -> None:
        if self._num_drafts_timed:
            seconds = min(seconds, 2 * float(self.seconds(np.array(depth))))
        self._num_drafts_timed += 1
        change = (seconds - self._plain_seconds) / (1 + depth) - self._draft_seconds
        self._draft_seconds += max(1 / self._num_drafts_timed, LEAST_WEIGHT) * change


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

    def _batch(self, num_requests: int) -> _Batch:
        kind = ((num_requests - 1).bit_length(), self._num_with_prompts >= STEPS_WITH_PROMPTS)
        return self._batches.setdefault(kind, _Batch())


def best_depths(chances: FloatArray, seconds: Callable[[FloatArray], FloatArray]) -> tuple[Depths, float]:
    """Depth [num_requests] of each request, given `chances` [num_requests, max_depth] that it and all before it hold,
    and what steps take by their drafts a request; and how many times the tokens a second of none that promises.

    Drafts are taken from the likeliest down, to where expected tokens a second are highest.
    """
    likeliest = np.sort(chances, axis=None)[::-1]
    num_taken = np.arange(1 + chances.size)
    num_tokens = len(chances) + np.concatenate(([0.0], likeliest.cumsum()))
    rates = num_tokens / seconds(num_taken / len(chances))
    best = int(rates.argmax())
    depths = np.count_nonzero(chances >= likeliest[best - 1], axis=1) if best else np.zeros(len(chances), np.int64)
    return depths, float(rates[best] / rates[0])


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
