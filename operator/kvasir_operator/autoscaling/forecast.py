"""What will be needed by the time a replica that is asked for now can serve: by trend, by what recurs, by time of day.

A forecast may raise what is wanted and never lowers it. It says nothing where the past does not bear it, and rests on
lasting demand alone: what waits is worked off.

What recurs, such as the load of a job of every quarter of an hour, is told by the need's own past. A load resembles
itself a minute ago; it comes back only where it has ceased to and then does again. Two former periods must be known,
and the lower of the two counts, so that one odd peak is not waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import StatisticsError, correlation, linear_regression, median

TREND_SECONDS = 600.0
LEAST_TREND_SECONDS = 120.0
LEAST_CORRELATION = 0.8
"""Of need with time: below it the need wavers, and has no trend."""
MOST_GROWTH = 1.5
"""Over what is needed now, by trend alone."""
LEAST_DAYS = 2
BIN_SECONDS = 60.0
MOST_BINS = 120
"""Kept: periods of up to an hour can be found."""
SEEN_AFTER_SECONDS = 60.0
"""Rates are over a minute, so that a former need was seen so much later than it began."""
LEAST_PERIOD_BINS = 5
LEAST_COMPARED_BINS = 10
LEAST_LIKENESS = 0.7
"""Correlation of the past with itself a period ago."""
UNLIKE = 0.3
"""Where it is below this at some shorter lag, the load has been another one meanwhile."""


@dataclass(frozen=True)
class PastNeed:
    at: float
    replicas: float


@dataclass(frozen=True)
class History:
    """The most that was needed in each minute, oldest first; the last one began at `begun_at`."""

    begun_at: float = 0.0
    bins: tuple[float, ...] = ()
    period: int | None = None
    """In bins, as found when the last one began: a search that need not be made every few seconds."""


def forecast(
    past: Sequence[PastNeed], history: History, now: float, ahead_seconds: float, days: Sequence[float] = ()
) -> float:
    """Replicas needed in `ahead_seconds`, 0 where nothing can be said. The last of `past` is what is needed now.

    `days`: what was needed at that time of former days.
    """
    by_day = median(days) if len(days) >= LEAST_DAYS else 0.0
    return max(_by_trend(past, now, ahead_seconds), recurring(history, ahead_seconds), by_day)


def _by_trend(past: Sequence[PastNeed], now: float, ahead_seconds: float) -> float:
    recent = [each for each in past if each.at > now - TREND_SECONDS]
    if len(recent) < 4 or recent[-1].at - recent[0].at < LEAST_TREND_SECONDS:
        return 0.0
    times, needs = [each.at - now for each in recent], [each.replicas for each in recent]
    if len(set(needs)) == 1 or correlation(times, needs) < LEAST_CORRELATION:
        return 0.0
    slope, level = linear_regression(times, needs)
    # A jump is no trend: what grows steadily does so in either half.
    middle = len(recent) // 2
    halves = (slice(middle), slice(middle, None))
    steady = min(slope, *(linear_regression(times[half], needs[half]).slope for half in halves))
    return min(min(level, needs[-1]) + steady * ahead_seconds, needs[-1] * MOST_GROWTH)


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
    """In bins: the lag of the best likeness, of those that reach back twice from a moment that is asked about, where
    the load first came back: it does so after two periods as well, which would be known later."""
    longest = min((len(bins) - 1 + num_ahead) // 2, len(bins) - LEAST_COMPARED_BINS)
    shortest = max(LEAST_PERIOD_BINS, num_ahead)
    found, best, was_unlike = None, LEAST_LIKENESS, False
    for lag in range(1, longest + 1):
        likeness = _likeness(bins[lag:], bins[:-lag])
        if likeness < UNLIKE and found is not None:
            break
        was_unlike = was_unlike or likeness < UNLIKE
        if was_unlike and lag >= shortest and likeness >= best:
            found, best = lag, likeness
    return found


def _likeness(one: Sequence[float], other: Sequence[float]) -> float:
    try:
        return correlation(one, other)
    except StatisticsError:  # one of them is constant
        return 0.0
