"""How many drafts each request asks for: as many as bring the most expected tokens a second, none where none pay.

Two things are measured as the engine runs: how often a request's drafts hold, position by position, and what steps of
a batch size cost with drafts and without. The choice is a pure function of what was observed: no clock, no chance.
Drafts count as asked for by the plan, found or not: a proposer that finds few then has a low acceptance and a low cost.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]
FloatArray = NDArray[np.float64]
Depths = NDArray[np.int64]

FIRST_ACCEPTANCE = 0.7
"""Believed of every draft before anything is known: high enough to try."""
PRIOR_TRIES = 4.0
"""What is known of all requests counts as so many tries of each."""
KEPT = 0.9
"""Of a request's tries, at each further try; of all requests' tries `KEPT_OF_ALL`."""
KEPT_OF_ALL = 0.99
KEPT_IDLE = 0.995
"""Of a request's tries at each step without drafts: what was held against it fades, and it is tried again."""
NUM_BINS = 32
"""Drafts are taken or left by their chance to hold, in steps of 1 / NUM_BINS."""
LEAST_GAIN = 1.02
"""Drafts must promise so much more than none."""
PROBE_STEPS = 3
PLAIN_INTERVAL = 128
"""Steps of a batch size after which one without drafts is timed again."""
FIRST_DRAFT_INTERVAL, LAST_DRAFT_INTERVAL = 64, 1024
"""Steps without drafts after which drafts are tried again; doubled each time that they do not pay."""
SMOOTHING = 0.1
FASTER, SLOWER = 0.25, 0.04
"""Weights of a step that took less, or more, than the running mean: what else the machine does only makes steps slower,
and a plain step believed too slow would make drafts look free."""

StepKind = Literal["plain", "drafted"]


class DepthPolicy:
    """Called by the scheduler: `depths` when it plans, the other methods when a step's result is there."""

    def __init__(self, max_num_seqs: int, max_depth: int) -> None:
        self.max_depth = max_depth
        self._acceptance = _Acceptance(max_num_seqs, max_depth)
        self._costs: dict[int, _StepCost] = {}  # by bit length of the number of requests

    def depths(self, rows: IntArray) -> Depths:
        """Drafts to ask for [num_requests]. 34 us for 256 rows of 4 drafts (one busy Xeon core)."""
        cost = self._cost(len(rows))
        wanted = cost.kind_to_probe()
        if wanted is not None:
            return np.full(len(rows), self.max_depth if wanted == "drafted" else 0)
        depths = best_depths(self._acceptance.chances[rows], cost.plain_seconds, cost.draft_seconds)
        cost.note_choice(drafts_pay=bool(depths.any()))
        return depths

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        """Of each request of a step, how many drafts the plan asked for and how many of them held (the token drawn
        after them not counted)."""
        self._acceptance.observe(rows, num_asked, num_accepted)

    def observe_step(self, num_requests: int, num_asked: int, num_proposals: int, seconds: float) -> None:
        """The time of a step of decodes only; steps with prefill chunks tell nothing about drafts.

        `num_asked` drafts in all were to be verified, and `num_proposals` a request proposed for the next step.
        """
        if (num_asked > 0) == (num_proposals > 0):
            self._cost(num_requests).observe(num_asked / num_requests, seconds)

    def forget(self, row: int) -> None:
        """Another sequence takes the row."""
        self._acceptance.forget(row)

    def _cost(self, num_requests: int) -> "_StepCost":
        return self._costs.setdefault((num_requests - 1).bit_length(), _StepCost())


def best_depths(chances: FloatArray, plain_seconds: float, draft_seconds: float) -> Depths:
    """Depth [num_requests] of each request, given `chances` [num_requests, max_depth] that it and all before it hold.

    A step without drafts takes `plain_seconds`, and `draft_seconds` more for each draft a request on average. Drafts
    are taken from the likeliest down, to where expected tokens a second are highest.
    """
    num_requests = len(chances)
    bins = (chances * NUM_BINS).astype(np.intp)
    flat = bins.ravel()
    num_taken = np.bincount(flat, minlength=NUM_BINS + 1)[::-1].cumsum()
    num_held = np.bincount(flat, chances.ravel(), minlength=NUM_BINS + 1)[::-1].cumsum()
    rates = (num_requests + num_held) / (plain_seconds + draft_seconds / num_requests * num_taken)
    best = int(rates.argmax())
    if rates[best] < LEAST_GAIN * num_requests / plain_seconds:
        return np.zeros(num_requests, np.int64)
    depths: Depths = np.count_nonzero(bins >= NUM_BINS - best, axis=1)
    return depths


class _Acceptance:
    """Of each row and draft, the chance that it holds where those before it do: tries and successes, the older fading,
    leaning on what all requests have shown."""

    def __init__(self, num_rows: int, max_depth: int) -> None:
        self._tries = np.zeros((num_rows, max_depth))
        self._held = np.zeros((num_rows, max_depth))
        self._all_tries = np.full(max_depth, PRIOR_TRIES)
        self._all_held = np.full(max_depth, PRIOR_TRIES * FIRST_ACCEPTANCE)
        self._places = np.arange(max_depth)
        self.chances = np.empty((num_rows, max_depth))
        """That a draft and all before it hold."""
        self.chances[:] = self._chances(self._tries, self._held)

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        asked, accepted = num_asked[:, None], num_accepted[:, None]
        held = self._places < accepted
        tried = (self._places < asked) & (self._places <= accepted)
        kept = np.where(tried, KEPT, np.where(asked == 0, KEPT_IDLE, 1.0))
        tries = self._tries[rows] * kept + tried
        successes = self._held[rows] * kept + held
        self._observe_all(tried, held)
        self._tries[rows], self._held[rows] = tries, successes
        self.chances[rows] = self._chances(tries, successes)

    def forget(self, row: int) -> None:
        self._tries[row] = self._held[row] = 0.0
        self.chances[row] = self._chances(self._tries[row], self._held[row])

    def _observe_all(self, tried: NDArray[np.bool_], held: NDArray[np.bool_]) -> None:
        num_tried = tried.sum(0)
        kept = np.where(num_tried, KEPT_OF_ALL, 1.0)
        share = num_tried / np.maximum(num_tried, 1)
        self._all_tries = self._all_tries * kept + share
        self._all_held = self._all_held * kept + held.sum(0) / np.maximum(num_tried, 1)

    def _chances(self, tries: FloatArray, held: FloatArray) -> FloatArray:
        prior = self._all_held / self._all_tries
        each: FloatArray = (held + PRIOR_TRIES * prior) / (tries + PRIOR_TRIES)
        return each.cumprod(-1)


@dataclass(slots=True)
class StepSeconds:
    """A running mean that leans on the faster steps, and that one slow step does not carry away."""

    mean: float = 0.0
    num_samples: int = 0
    steps_since: int = 0

    def add(self, seconds: float) -> None:
        self.num_samples += 1
        self.steps_since = 0
        if self.num_samples == 1:
            self.mean = seconds
        elif self.num_samples <= PROBE_STEPS:  # the first steps of a kind may warm up: the fastest counts
            self.mean = min(self.mean, seconds)
        else:
            weight = FASTER if seconds < self.mean else SLOWER
            self.mean += weight * (min(seconds, 2 * self.mean) - self.mean)


@dataclass(slots=True)
class _StepCost:
    """What steps of one batch size take, and when to time again the kind that is not being run."""

    _plain: StepSeconds = field(default_factory=StepSeconds)
    _drafted: StepSeconds = field(default_factory=StepSeconds)
    _mean_depth: float = 1.0
    _draft_interval: int = FIRST_DRAFT_INTERVAL
    _probe: StepKind | None = None
    _probe_steps_left: int = 0

    @property
    def plain_seconds(self) -> float:
        return self._plain.mean

    @property
    def draft_seconds(self) -> float:
        """Of one more draft a request."""
        return max(self._drafted.mean - self._plain.mean, 0.0) / self._mean_depth

    def observe(self, depth: float, seconds: float) -> None:
        """`depth` drafts a request on average."""
        kind: StepKind = "drafted" if depth else "plain"
        timed = self._drafted if depth else self._plain
        self._plain.steps_since += 1
        self._drafted.steps_since += 1
        timed.add(seconds)
        if depth:
            weight = SMOOTHING if self._drafted.num_samples > PROBE_STEPS else 1.0
            self._mean_depth += weight * (depth - self._mean_depth)
        if kind == self._probe:
            self._probe_steps_left -= 1
            if self._probe_steps_left == 0:
                self._probe = None

    def kind_to_probe(self) -> StepKind | None:
        """What the next step must be for its time to be known; None: what pays most."""
        if self._probe is None:
            self._probe, self._probe_steps_left = self._due(), PROBE_STEPS
        return self._probe

    def note_choice(self, *, drafts_pay: bool) -> None:
        if drafts_pay:
            self._draft_interval = FIRST_DRAFT_INTERVAL

    def _due(self) -> StepKind | None:
        if self._drafted.num_samples == 0:
            return "drafted"
        if self._plain.num_samples == 0 or self._plain.steps_since >= PLAIN_INTERVAL:
            return "plain"
        if self._drafted.steps_since >= self._draft_interval:
            self._draft_interval = min(2 * self._draft_interval, LAST_DRAFT_INTERVAL)
            return "drafted"
        return None


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always as many drafts, whether they pay or not."""

    max_depth: int

    def depths(self, rows: IntArray) -> Depths:
        return np.full(len(rows), self.max_depth)

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        """Nothing is learned."""

    def observe_step(self, num_requests: int, num_asked: int, num_proposals: int, seconds: float) -> None:
        """Nothing is learned."""

    def forget(self, row: int) -> None:
        """Nothing is known of it."""
