"""How many drafts each request asks for: as many as bring the most expected tokens a second, none where none pay.

Two averages are kept as the engine runs: how often a request's drafts hold (`acceptance`), and what steps of a batch
size take by their drafts (`cost_table`). The choice is a pure function of what was observed: no clock or chance. Drafts
count as asked for by the plan, found or not: a proposer that finds few then has a low acceptance and a low cost.

Estimates propose, an account decides: drafts that lose more than they have gained are left, and tried again for a few
steps, the more rarely the more often they fail. Where nobody drafts the proposer is not even shown the steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.scheduling.step import TimedStep
from kvasir_runtime.speculative.acceptance import Acceptance, FloatArray, IntArray
from kvasir_runtime.speculative.cost_table import PROBE_STEPS, CostTable

Depths = NDArray[np.int64]

NUM_BINS = 32
"""Drafts are taken or left by their chance to hold, in steps of 1 / NUM_BINS."""
LEAST_GAIN = 1.02
"""Drafts must promise so much more than none."""
REVIEW_STEPS = 16
"""Where no draft pays, steps after which they are weighed again; at once when the sequences change."""
PLAIN_INTERVAL = 128
"""Steps with drafts after which one without is timed again."""
FEWEST_STEPS_BETWEEN_PROBES, MOST_STEPS_BETWEEN_PROBES = 512, 1 << 14
"""Doubled at each that fails."""
MOST_PROBE_STEPS = 32
"""After which a probe is given up: steps with prompts or first of their shape are not timed."""
MOST_LOST, MOST_SAVED = 8.0, 32.0
"""In plain steps: drafts are left once they have lost so much, beyond what they had gained, up to so much of it."""
STEPS_WITH_PROMPTS = 16
"""Of a batch size in a row, after which no others are waited for: they differ too much to be compared with the rest."""


@dataclass(slots=True)
class _Batch:
    """A batch size, and what is done about drafts there."""

    costs: CostTable
    wait: int = FEWEST_STEPS_BETWEEN_PROBES
    """Steps without drafts after which they are tried again."""
    num_without: int = FEWEST_STEPS_BETWEEN_PROBES
    """Steps since drafts were asked for. Where nothing is believed of drafts they are tried at once."""
    since_plain: int = 0
    """Steps since one without drafts."""
    probe_left: int = 0
    """Steps that may still be used to time drafts; 0: no probe is under way."""
    is_left: bool = False
    """Whether drafts lost too much, whatever they promise."""
    review_in: int = 0
    """Steps for which nothing pays that was weighed."""
    gained: float = 0.0
    """In plain steps, by drafts since they were taken up or tried."""

    def observe(self, step: TimedStep, *, is_comparable: bool) -> None:
        if step.num_asked or step.num_proposals:
            self.num_without = 0 if self.costs.is_plain_timed else self.num_without
            self.since_plain += 1
            self.probe_left = max(0, self.probe_left - 1)
        else:
            self.num_without, self.since_plain = self.num_without + 1, 0
            self.review_in = max(0, self.review_in - 1)
        if is_comparable:
            self._time(step)
        if self.probe_left and self.costs.num_drafted >= PROBE_STEPS:
            self.probe_left, self.gained = 0, 0.0
        if self.costs.is_plain_timed and self.num_without >= self.wait and not self.probe_left:
            self._begin_probe()

    def _time(self, step: TimedStep) -> None:
        if not (step.num_asked or step.num_proposals):
            self.costs.add(0, step.seconds)
        elif self.costs.plain_seconds:
            if step.num_asked and step.num_proposals:  # else it only begins or ends drafting
                self.costs.add(step.num_asked / step.num_decodes, step.seconds)
            brought = 1 + step.num_accepted / step.num_decodes
            cost = min(step.seconds / self.costs.plain_seconds, 1 + MOST_LOST)  # one slow step is no reason to leave
            self.gained = min(self.gained + brought - cost, MOST_SAVED)
        if self.gained < -MOST_LOST and not self.probe_left:
            self.is_left, self.gained = True, 0.0
        if self.gained > MOST_LOST:
            self.wait = FEWEST_STEPS_BETWEEN_PROBES

    def _begin_probe(self) -> None:
        self.costs.forget_drafted()
        self.probe_left, self.is_left, self.review_in, self.num_without = MOST_PROBE_STEPS, False, 0, 0
        self.wait = min(2 * self.wait, MOST_STEPS_BETWEEN_PROBES)


class DepthPolicy:
    """Called by the scheduler: `depths` when it plans, the other methods when a step's result is there."""

    def __init__(self, max_num_seqs: int, max_depth: int) -> None:
        self.max_depth = max_depth
        self._acceptance = Acceptance(max_num_seqs, max_depth)
        self._batches: dict[tuple[int, bool], _Batch] = {}
        """By bit length of the number of requests, of steps with prompts and without."""
        self._num_with_prompts: dict[int, int] = {}
        """Of each bit length the last steps in a row."""

    def depths(self, rows: IntArray) -> Depths:
        """Drafts to ask for [num_requests]."""
        batch = self._batch(len(rows))
        nothing = np.zeros(len(rows), np.int64)
        must_wait = batch.is_left or batch.review_in or batch.since_plain >= PLAIN_INTERVAL
        if not batch.costs.is_plain_timed or (must_wait and not batch.probe_left):
            return nothing
        if not batch.costs.is_known:
            return nothing + self.max_depth if batch.probe_left else nothing
        if batch.num_without:
            self._acceptance.fade(rows, batch.num_without)
        least_gain = 0.0 if batch.probe_left else LEAST_GAIN
        depths = best_depths(self._acceptance.chances[rows], batch.costs, least_gain)
        if batch.probe_left:
            return np.maximum(depths, 1)
        if not depths.any():
            batch.review_in = REVIEW_STEPS
        return depths

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        """Of each request of a step with drafts, how many the plan asked for and how many of them held (the token drawn
        after them not counted)."""
        self._acceptance.observe(rows, num_asked, num_accepted)

    def observe_step(self, step: TimedStep) -> None:
        if step.is_warming_up or not step.num_decodes:
            return  # it says nothing of those to come
        size = (step.num_decodes - 1).bit_length()
        self._num_with_prompts[size] = self._num_with_prompts.get(size, 0) + 1 if step.num_prompt_tokens else 0
        batch = self._batch(step.num_decodes)
        has_prompts = self._num_with_prompts[size] >= STEPS_WITH_PROMPTS
        batch.observe(step, is_comparable=has_prompts or not step.num_prompt_tokens)

    def forget(self, row: int) -> None:
        """Another sequence takes the row."""
        self._acceptance.forget(row)
        for batch in self._batches.values():
            batch.review_in = 0

    def _batch(self, num_requests: int) -> _Batch:
        """A new one believes of drafts what the nearest size of its kind has measured."""
        size = (num_requests - 1).bit_length()
        kind = (size, self._num_with_prompts.get(size, 0) >= STEPS_WITH_PROMPTS)
        if kind not in self._batches:
            others = [other for other in self._batches if other[1] == kind[1] and self._batches[other].costs.is_known]
            nearest = min(others, key=lambda other: (abs(other[0] - size), other[0]), default=None)
            if nearest is None:
                self._batches[kind] = _Batch(CostTable(self.max_depth))
            else:
                other = self._batches[nearest]
                self._batches[kind] = _Batch(CostTable(self.max_depth, other.costs), other.wait, num_without=0)
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
