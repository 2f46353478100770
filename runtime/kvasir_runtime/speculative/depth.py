"""How many drafts each request asks for: as many as bring the most expected tokens a second, none where none pay.

Two things are measured as the engine runs: how often a request's drafts hold (`acceptance`), and what steps of a batch
size cost with drafts and without (`step_cost`). The choice is a pure function of what was observed: no clock or chance.
Drafts count as asked for by the plan, found or not: a proposer that finds few then has a low acceptance and a low cost.

Steps with prompts differ too much from each other to be compared with the rest. A busy server may have no others: then
they are a kind of their own, of which steps with drafts and without are compared.

Where drafts do not pay nobody is asked for any, the proposer is not even shown the steps, and deciding is a look at a
counter. They are tried again for a few steps now and then, the more rarely the more it costs, and left where they lose
more than was believed.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.scheduling.step import TimedStep
from kvasir_runtime.speculative.acceptance import Acceptance, FloatArray, IntArray
from kvasir_runtime.speculative.step_cost import BatchCost, PromptCost

Depths = NDArray[np.int64]

NUM_BINS = 32
"""Drafts are taken or left by their chance to hold, in steps of 1 / NUM_BINS."""
LEAST_GAIN = 1.02
"""Drafts must promise so much more than none."""
REVIEW_STEPS = 16
"""Where drafts do not pay, steps after which they are weighed again; at once when the sequences change."""
STEPS_WITH_PROMPTS = 16
"""Of a batch size in a row, after which no others are waited for."""


@dataclass(slots=True)
class _Batch:
    """What was decided for a batch size, and what of."""

    cost: BatchCost
    has_prompts: bool = False
    """Whether it is of steps with prompts."""
    drafts_pay: bool = False
    steps_since_review: int = REVIEW_STEPS
    num_forgotten: int = 0
    """`DepthPolicy._num_forgotten` at the last review."""


@dataclass(slots=True)
class _Batches:
    """By bit length of the number of requests, with prompts and without; a new one believes of drafts what the nearest
    size of its kind has measured."""

    _known: dict[tuple[int, bool], _Batch] = field(default_factory=dict)
    _num_with_prompts: Counter[int] = field(default_factory=Counter)
    """Of each bit length the last steps in a row."""

    def of(self, num_requests: int) -> _Batch:
        size = (num_requests - 1).bit_length()
        has_prompts = self._num_with_prompts[size] >= STEPS_WITH_PROMPTS
        if (size, has_prompts) not in self._known:
            same_kind = (other for other, is_mixed in self._known if is_mixed == has_prompts)
            nearest = sorted(same_kind, key=lambda other: (abs(other - size), other))
            costs = (self._known[other, has_prompts].cost for other in nearest)
            measured = next((cost for cost in costs if cost.ratio is not None), None)
            cost = BatchCost() if measured is None else measured.of_another_size()
            self._known[size, has_prompts] = _Batch(cost, has_prompts)
        return self._known[size, has_prompts]

    def observe(self, step: TimedStep, prompt_seconds: float) -> None:
        """A step of decodes, which has to bring in `prompt_seconds` where it has no prompts itself."""
        size = (step.num_decodes - 1).bit_length()
        self._num_with_prompts[size] = self._num_with_prompts[size] + 1 if step.num_prompt_tokens else 0
        batch = self.of(step.num_decodes)
        if batch.has_prompts:
            batch.cost.observe(step)
        elif not step.num_prompt_tokens:
            batch.cost.observe(step, prompt_seconds)


class DepthPolicy:
    """Called by the scheduler: `depths` when it plans, the other methods when a step's result is there."""

    def __init__(self, max_num_seqs: int, max_depth: int) -> None:
        self.max_depth = max_depth
        self._acceptance = Acceptance(max_num_seqs, max_depth)
        self._batches = _Batches()
        self._prompts = PromptCost()
        self._num_forgotten = 0

    def depths(self, rows: IntArray) -> Depths:
        """Drafts to ask for [num_requests]."""
        batch = self._batches.of(len(rows))
        cost = batch.cost
        batch.steps_since_review += 1
        if cost.needs_plain(drafts_pay=batch.drafts_pay):
            return np.zeros(len(rows), np.int64)
        if cost.is_probing:
            cost.note_probe_planned()
            return self._probe_depths(rows, cost)
        if not (batch.drafts_pay or self._is_review_due(batch)):
            return np.zeros(len(rows), np.int64)
        return self._review(batch, rows)

    def most_depth(self, rows: IntArray) -> int:
        """The most drafts that pay for one of a batch of these requests, which nothing is decided for."""
        batch = self._batches.of(len(rows))
        cost = batch.cost
        if cost.needs_plain(drafts_pay=batch.drafts_pay):
            return 0
        if cost.is_probing:
            return int(self._probe_depths(rows, cost).max())
        if not (batch.drafts_pay or self._is_review_due(batch)):
            return 0
        return int(self._paying_depths(batch, rows).max())

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        """Of each request of a step with drafts, how many the plan asked for and how many of them held (the token drawn
        after them not counted)."""
        self._acceptance.observe(rows, num_asked, num_accepted)

    def observe_step(self, step: TimedStep) -> None:
        if step.is_warming_up:
            return  # it says nothing of those to come
        self._prompts.observe(step)
        if step.num_decodes:
            self._batches.observe(step, self._prompts.seconds_a_step)

    def forget(self, row: int) -> None:
        """Another sequence takes the row."""
        self._acceptance.forget(row)
        self._num_forgotten += 1

    def _is_review_due(self, batch: _Batch) -> bool:
        is_new = batch.num_forgotten != self._num_forgotten or batch.cost.has_probed
        return is_new or batch.steps_since_review >= REVIEW_STEPS

    def _review(self, batch: _Batch, rows: IntArray) -> Depths:
        """What pays now; where nothing does, perhaps a probe."""
        cost = batch.cost
        if not batch.drafts_pay:
            self._acceptance.fade(rows, batch.steps_since_review)
        batch.steps_since_review, batch.num_forgotten = 0, self._num_forgotten
        depths = self._paying_depths(batch, rows)
        did_pay, batch.drafts_pay = batch.drafts_pay, bool(depths.any())
        cost.note_choice(drafts_paid=did_pay, drafts_pay=batch.drafts_pay)
        if not batch.drafts_pay and cost.is_probe_due:
            cost.begin_probe()
            cost.note_probe_planned()
            return self._probe_depths(rows, cost)
        return depths

    def _paying_depths(self, batch: _Batch, rows: IntArray) -> Depths:
        cost = batch.cost
        if cost.draft_seconds is None or not cost.may_draft(drafts_pay=batch.drafts_pay):
            return np.zeros(len(rows), np.int64)
        fixed_seconds = cost.fixed_seconds + (0.0 if batch.has_prompts else self._prompts.seconds_a_step)
        return best_depths(self._acceptance.chances[rows], cost.plain.mean, cost.draft_seconds, fixed_seconds)

    def _probe_depths(self, rows: IntArray, cost: BatchCost) -> Depths:
        """All drafts while nothing is known of their cost, then what promises most."""
        if cost.draft_seconds is None:
            return np.full(len(rows), self.max_depth)
        best = best_depths(self._acceptance.chances[rows], cost.plain.mean, cost.draft_seconds, least_gain=0.0)
        return np.maximum(best, 1)


def best_depths(
    chances: FloatArray,
    plain_seconds: float,
    draft_seconds: float,
    fixed_seconds: float = 0.0,
    least_gain: float = LEAST_GAIN,
) -> Depths:
    """Depth [num_requests] of each request, given `chances` [num_requests, max_depth] that it and all before it hold.

    A step without drafts takes `plain_seconds`, one with any `fixed_seconds` more and `draft_seconds` for each draft a
    request on average. Drafts are taken from the likeliest down, to where expected tokens a second are highest.
    """
    num_requests = len(chances)
    bins = (chances * NUM_BINS).astype(np.intp)
    flat = bins.ravel()
    num_taken = np.bincount(flat, minlength=NUM_BINS + 1)[::-1].cumsum()
    num_held = np.bincount(flat, chances.ravel(), minlength=NUM_BINS + 1)[::-1].cumsum()
    seconds = plain_seconds + fixed_seconds * (num_taken > 0) + draft_seconds / num_requests * num_taken
    rates = (num_requests + num_held) / seconds
    best = int(rates.argmax())
    if rates[best] < least_gain * num_requests / plain_seconds:
        return np.zeros(num_requests, np.int64)
    depths: Depths = np.count_nonzero(bins >= NUM_BINS - best, axis=1)
    return depths


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always as many drafts, whether they pay or not."""

    max_depth: int

    def depths(self, rows: IntArray) -> Depths:
        return np.full(len(rows), self.max_depth)

    def most_depth(self, rows: IntArray) -> int:
        return self.max_depth

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        """Nothing is learned."""

    def observe_step(self, step: TimedStep) -> None:
        """Nothing is learned."""

    def forget(self, row: int) -> None:
        """Nothing is known of it."""
