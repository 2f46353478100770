"""What was observed of drafts: how likely they hold, and what steps take that verify them."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]
FloatArray = NDArray[np.float64]

FIRST_TRIES, FIRST_ACCEPTANCE = 2.0, 0.7
"""Believed of every draft before anything is known: high enough to try."""
PRIOR_TRIES = 4.0
"""What is known of all requests counts as so many tries of each."""
KEPT, KEPT_OF_ALL = 0.9, 0.99
"""Of a request's tries at each further try, and of all requests' tries."""
KEPT_IDLE = 0.995
"""Of a request's tries at each step without drafts: what was held against it fades, and it is tried again."""
TIMINGS = 3
"""Of plain steps, after which their time is believed."""
LEAST_WEIGHT = 0.1
"""Of the latest step in the average time of those like it."""


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

    def fade(self, rows: IntArray, num_steps: int) -> None:
        """The rows went on for so many steps without drafts."""
        self._tries[rows] *= KEPT_IDLE**num_steps
        self._held[rows] *= KEPT_IDLE**num_steps

    def forget(self, row: int) -> None:
        self._tries[row] = self._held[row] = 0.0


class CostTable:
    """What steps take by the drafts that they verify a request, rounded; those of a step that drafts at all to 1 at
    least. A step without drafts does no drafting work at all, so that the difference is the whole cost."""

    def __init__(self, max_depth: int) -> None:
        self._seconds = np.zeros(1 + max_depth)  # 0: never timed
        self._num_timed = np.zeros(1 + max_depth, np.int64)
        self._is_drafting_old = False

    @property
    def plain_seconds(self) -> float:
        return float(self._seconds[0])

    @property
    def is_plain_known(self) -> bool:
        return bool(self._num_timed[0] >= TIMINGS)

    @property
    def is_drafting_known(self) -> bool:
        return bool(self._seconds[1:].any())

    def add(self, depth: float, seconds: float) -> None:
        """A step that verified `depth` drafts a request on average took so long; a slow one counts as twice the average
        at most."""
        place = max(1, round(depth)) if depth else 0
        if place and self._is_drafting_old:
            self._seconds[1:], self._num_timed[1:], self._is_drafting_old = 0.0, 0, False
        self._num_timed[place] += 1
        believed, weight = self._seconds[place] or seconds, max(1 / self._num_timed[place], LEAST_WEIGHT)
        self._seconds[place] = believed + weight * (min(seconds, 2 * believed) - believed)

    def time_drafts_anew(self) -> None:
        """What was known of them is believed until the next of their steps, and forgotten then."""
        self._is_drafting_old = True

    def seconds(self, depths: FloatArray) -> FloatArray:
        """Of steps that verify so many drafts a request on average. Between depths that were timed along a line, beyond
        them as if drafting at all cost as much as a draft; no shallower step takes longer than a deeper one."""
        known, at = 1 + np.flatnonzero(self._seconds[1:]), np.maximum(depths, 1.0)
        extra = np.minimum.accumulate(self._seconds[known][::-1])[::-1] - self.plain_seconds
        scale = (1 + at) / (1 + at.clip(known[0], known[-1]))
        return self.plain_seconds + np.where(depths > 0, np.interp(at, known, np.maximum(extra, 0.0)) * scale, 0.0)
