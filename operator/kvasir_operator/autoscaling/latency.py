"""Latencies at the 90th percentile against the SLO: they may call for more replicas, and forbid fewer.

An SLO that more replicas do not bring nearer does neither: after a trial that changed nothing it is left alone for a
while, so that a limit of the model or the device neither grows the role without end nor keeps it from shrinking.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvasir_operator.autoscaling.behavior import TOLERANCE
from kvasir_operator.autoscaling.demand import Need, ScalingReason

MOST_GROWTH = 1.25
"""In one step: latencies grow out of all proportion where a queue does, and tell of requests that came long before."""
LEAST_GAIN = 0.1
"""Of the latency, that a trial must bring."""
GIVE_UP_SECONDS = 900.0
"""For so long an SLO is left alone after a trial in vain, and tried with replicas that cannot become more."""


@dataclass(frozen=True)
class Latency:
    """`floor_seconds`: the part of it that no number of replicas changes."""

    reason: ScalingReason
    p90_seconds: float
    slo_seconds: float
    floor_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        return self.p90_seconds / self.slo_seconds

    def with_replicas(self, before: int, after: int) -> float:
        """The same load on `after` replicas, as a ratio to the SLO."""
        own = min(self.floor_seconds, self.p90_seconds)
        return (own + (self.p90_seconds - own) * before / after) / self.slo_seconds


@dataclass(frozen=True)
class Trial:
    """A latency was `ratio` to its SLO, and is to be less from `judged_at` on: replicas were added for it, or there is
    no more to add. `in_vain_since`: that it did not help."""

    reason: ScalingReason
    ratio: float
    judged_at: float
    in_vain_since: float | None = None


def judged(trial: Trial | None, latencies: Sequence[Latency], now: float) -> Trial | None:
    """What is known of a trial once its replicas have served for a while; None once it is over."""
    if trial is None:
        return None
    ratio = next((each.ratio for each in latencies if each.reason is trial.reason), 0.0)
    if ratio <= 1:
        return None
    if trial.in_vain_since is not None:
        is_worse = ratio > trial.ratio * (1 + LEAST_GAIN)  # so that replicas, or load, make a difference
        return None if is_worse or now - trial.in_vain_since >= GIVE_UP_SECONDS else trial
    if now < trial.judged_at:
        return trial
    return None if ratio < trial.ratio * (1 - LEAST_GAIN) else replace(trial, in_vain_since=now)


def standing_trial(trial: Trial | None, latencies: Sequence[Latency], now: float) -> Trial | None:
    """`trial`, or one that begins where a latency is over its SLO and nothing is tried: at the most replicas, or so
    little over it that none is added."""
    worst = max(latencies, key=lambda each: each.ratio, default=None)
    if trial is not None or worst is None or worst.ratio <= 1:
        return trial
    return Trial(worst.reason, worst.ratio, now + GIVE_UP_SECONDS)


def attainable(trial: Trial | None, latencies: Sequence[Latency]) -> list[Latency]:
    """Those that are worth guarding."""
    given_up = trial.reason if trial is not None and trial.in_vain_since is not None else None
    return [each for each in latencies if each.reason is not given_up and each.floor_seconds < each.slo_seconds]


def latency_need(latencies: Sequence[Latency], num_ready: int) -> Need | None:
    """Of the worst, where it is over its SLO by more than the tolerance."""
    worst = max(latencies, key=lambda each: each.ratio, default=None)
    if worst is None or worst.ratio <= 1 + TOLERANCE:
        return None
    text = f"p90 of {worst.p90_seconds:.3f} s over {worst.slo_seconds:g} s on {num_ready} replicas"
    return Need(num_ready * min(worst.ratio, MOST_GROWTH), worst.reason, text)
