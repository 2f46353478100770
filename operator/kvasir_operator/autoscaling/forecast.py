"""What will be needed by the time a replica that is asked for now can serve: by trend, by what recurs, by time of day.

A forecast may raise what is wanted and never lowers it. It says nothing where the past does not bear it, and rests on
lasting demand alone: what waits is worked off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation, linear_regression, median

from kvasir_operator.autoscaling.recurrence import History, recurring

TREND_SECONDS = 600.0
LEAST_TREND_SECONDS = 120.0
LEAST_CORRELATION = 0.8
"""Of need with time: below it the need wavers, and has no trend."""
MOST_GROWTH = 1.5
"""Over what is needed now, by trend alone."""
LEAST_DAYS = 2


@dataclass(frozen=True)
class PastNeed:
    at: float
    replicas: float


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
