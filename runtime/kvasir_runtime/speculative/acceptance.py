"""How likely drafts are to hold, row by row and position by position, learned from what was verified.

A row's own tries fade as it makes new ones, and lean on what all requests have shown.
"""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]
FloatArray = NDArray[np.float64]

FIRST_ACCEPTANCE = 0.7
"""Believed of every draft before anything is known: high enough to try. Counts as `FIRST_TRIES`."""
FIRST_TRIES = 2.0
PRIOR_TRIES = 4.0
"""What is known of all requests counts as so many tries of each."""
KEPT = 0.9
"""Of a request's tries, at each further try; of all requests' tries `KEPT_OF_ALL`."""
KEPT_OF_ALL = 0.99
KEPT_IDLE = 0.995
"""Of a request's tries at each step without drafts: what was held against it fades, and it is tried again."""


class Acceptance:
    """Of each row and draft, the chance that it holds where those before it do."""

    def __init__(self, num_rows: int, max_depth: int) -> None:
        self._tries = np.zeros((num_rows, max_depth))
        self._held = np.zeros((num_rows, max_depth))
        self._all_tries = np.full(max_depth, FIRST_TRIES)
        self._all_held = np.full(max_depth, FIRST_TRIES * FIRST_ACCEPTANCE)
        self._places = np.arange(max_depth)
        self.chances = np.empty((num_rows, max_depth))
        """That a draft and all before it hold."""
        self.chances[:] = self._chances(self._tries, self._held)

    def observe(self, rows: IntArray, num_asked: IntArray, num_accepted: IntArray) -> None:
        """Of each row, how many drafts were to be verified and how many of them held."""
        asked, accepted = num_asked[:, None], num_accepted[:, None]
        held = self._places < accepted
        tried = (self._places < asked) & (self._places <= accepted)
        kept = np.where(tried, KEPT, np.where(asked == 0, KEPT_IDLE, 1.0))
        self._observe_all(tried, held)
        self._set(rows, self._tries[rows] * kept + tried, self._held[rows] * kept + held)

    def fade(self, rows: IntArray, num_steps: int) -> None:
        """The rows went on for so many steps without drafts."""
        kept = KEPT_IDLE**num_steps
        self._set(rows, self._tries[rows] * kept, self._held[rows] * kept)

    def forget(self, row: int) -> None:
        self._set(np.array([row]), np.zeros((1, len(self._places))), np.zeros((1, len(self._places))))

    def _set(self, rows: IntArray, tries: FloatArray, held: FloatArray) -> None:
        self._tries[rows], self._held[rows] = tries, held
        self.chances[rows] = self._chances(tries, held)

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
