"""What comes back: load that repeats itself, such as that of a job of every quarter of an hour, by the need's own past.

A load resembles itself a minute ago; it comes back only where it has ceased to and then does again. Two former periods
must be known, and the lower of the two counts, so that one odd peak is not waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import StatisticsError, correlation

BIN_SECONDS = 60.0
MOST_BINS = 120
"""Kept: periods of up to an hour can be found."""
SEEN_AFTER_SECONDS = 60.0
"""Rates are over a minute, so that a former need was seen so much later than it began."""
LEAST_PERIOD_BINS = 5
LEAST_COMPARED_BINS = 10
LEAST_LIKENESS = 0.8
"""Correlation of the past with itself a period ago."""
UNLIKE = 0.3
"""Where it is below this at some shorter lag, the load has been another one meanwhile."""


@dataclass(frozen=True)
class History:
    """The most that was needed in each minute, oldest first; the last one began at `begun_at`."""

    begun_at: float = 0.0
    bins: tuple[float, ...] = ()
    period: int | None = None
    """In bins, as found when the last one began: a search that need not be made every few seconds."""


def noted(history: History, at: float, replicas: float, ahead_seconds: float) -> History:
    """With a further measurement. Minutes without one, as in an outage of the metrics, are as the one before.

    `ahead_seconds`: how far ahead `recurring` will be asked to look.
    """
    if not history.bins or at - history.begun_at > MOST_BINS * BIN_SECONDS:
        return History(at, (replicas,))
    *former, last = history.bins
    num_later = int((at - history.begun_at) // BIN_SECONDS)
    if num_later == 0:
        return replace(history, bins=(*former, max(last, replicas)))
    bins = (*history.bins, *(last for _ in range(num_later - 1)), replicas)[-MOST_BINS:]
    return History(history.begun_at + num_later * BIN_SECONDS, bins, _period(bins, _num_ahead(ahead_seconds)))


def recurring(history: History, ahead_seconds: float) -> float:
    """The most that is needed until `ahead_seconds` from now if what has come back once does so again; else 0."""
    bins, period, now = history.bins, history.period, len(history.bins) - 1
    if period is None:
        return 0.0
    ahead = range(1, min(_num_ahead(ahead_seconds), period) + 1)
    known = [now + each - period for each in ahead if now + each >= 2 * period]
    return max((min(bins[each], bins[each - period]) for each in known), default=0.0)


def _num_ahead(seconds: float) -> int:
    return ceil((seconds + SEEN_AFTER_SECONDS) / BIN_SECONDS)


def _period(bins: Sequence[float], num_ahead: int) -> int | None:
    """In bins: the lag of the best likeness, of those that reach back twice from a moment that is asked about."""
    longest = min((len(bins) - 1 + num_ahead) // 2, len(bins) - LEAST_COMPARED_BINS)
    shortest = max(LEAST_PERIOD_BINS, num_ahead)
    found, best, was_unlike = None, LEAST_LIKENESS, False
    for lag in range(1, longest + 1):
        likeness = _likeness(bins[lag:], bins[:-lag])
        was_unlike = was_unlike or likeness < UNLIKE
        if was_unlike and lag >= shortest and likeness >= best:
            found, best = lag, likeness
    return found


def _likeness(one: Sequence[float], other: Sequence[float]) -> float:
    try:
        return correlation(one, other)
    except StatisticsError:  # one of them is constant
        return 0.0
