"""How fast replicas may change: windows, policies and tolerance with the meaning that a HorizontalPodAutoscaler gives.

Windows look at former recommendations, policies at former changes; both are part of the memory that is handed in.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvasir_operator.api.model import ScalingBehavior, ScalingPolicy, ScalingRules

TOLERANCE = 0.1
UP_WINDOW_SECONDS = 0
DOWN_WINDOW_SECONDS = 300
"""At most, where none is asked for."""
LEAST_DOWN_WINDOW_SECONDS = SEEN_SECONDS = 60
"""Rates are over a minute."""
_UP_POLICIES = (ScalingPolicy("Percent", 100, 15),)
_DOWN_POLICIES = (ScalingPolicy("Percent", 50, 60),)
MOST_SECONDS = 3600
"""No window or period is longer."""
GAP_SECONDS = 40
"""Two turns of the loop, and what they vary by. Without a recommendation for longer a window begins anew, but where
turns are further apart."""


@dataclass(frozen=True)
class Recommendation:
    at: float
    replicas: int


@dataclass(frozen=True)
class Change:
    """`delta`: replicas added, or taken away where below zero. `ahead_seconds`: until the load that they are for.
    `is_tried`: for times between tokens over their SLO, which may not be by load."""

    at: float
    delta: int
    ahead_seconds: float = 0.0
    is_tried: bool = False


def rounded(needed: float, former: int, growth_tolerance: float = TOLERANCE) -> int:
    """Whole replicas for `needed`; `former` while they differ by no more than the tolerance.

    `former`: as recommended last, which policies may not have let the role reach yet. `growth_tolerance`: for more than
    that.
    """
    if former and -TOLERANCE - 1e-9 <= needed / former - 1 <= growth_tolerance + 1e-9:
        return former
    return math.ceil(needed - 1e-9)


@dataclass(frozen=True)
class Returns:
    """How load has come back in the last hour. `window_seconds`: that replicas are kept without need. `are_brief`: it
    was gone again before a replica that was asked for it served, so that only those that were kept are of use."""

    window_seconds: float
    are_brief: bool = False


def returns_of(changes: Sequence[Change], startup_seconds: float, current: int) -> Returns:
    """They are kept for as long as a replica takes to start, which is what it costs to have let one go that is wanted
    again; where load came back, as long as the longest lull of those that a HorizontalPodAutoscaler's window outlasts,
    twice that where returns are brief. Brief ones that double the replicas come at odd times: there twice the lull,
    since the next that is longer than those before would find all gone.

    `changes`: of the last hour, oldest first, that have led to `current`.
    """
    window = min(max(startup_seconds, LEAST_DOWN_WINDOW_SECONDS), DOWN_WINDOW_SECONDS)
    # The end of load is seen a minute later, or once what waited while replicas started is worked off.
    brief_seconds = startup_seconds + max(startup_seconds, SEEN_SECONDS)
    shrunk_at, grown_at, are_brief, are_doubling = -math.inf, math.inf, False, False
    replicas = before = current - sum(change.delta for change in changes)
    for change in changes:
        wanted_at = change.at + change.ahead_seconds
        if change.delta > 0:
            lull_seconds = window + wanted_at - shrunk_at  # a window had passed before
            most = DOWN_WINDOW_SECONDS * (2 if are_brief else 1)
            if lull_seconds <= most:
                window = min(2 * lull_seconds, most) if are_doubling and not change.is_tried else lull_seconds
            shrunk_at, grown_at = -math.inf, min(grown_at, wanted_at)
        else:
            if grown_at < math.inf:
                are_brief = change.at - window - grown_at <= brief_seconds
                are_doubling = are_brief and replicas >= 2 * before
            shrunk_at, grown_at, before = change.at, math.inf, replicas + change.delta
        replicas += change.delta
    return Returns(window, are_brief)


def stabilized(
    recommendations: Sequence[Recommendation],
    current: int,
    behavior: ScalingBehavior,
    now: float,
    default_down_seconds: float = DOWN_WINDOW_SECONDS,
) -> int:
    """The latest recommendation, as far as all of each direction's window agree. The latest is the last of them."""
    latest = recommendations[-1].replicas
    up = _within(recommendations, now, _window(behavior.scale_up, UP_WINDOW_SECONDS))
    down = _within(recommendations, now, _window(behavior.scale_down, default_down_seconds))
    lowest, highest = min([latest, *up]), max([latest, *down])
    if lowest > current:
        return lowest
    return min(current, highest)


def limited(wanted: int, current: int, changes: Sequence[Change], behavior: ScalingBehavior, now: float) -> int:
    """As far from `current` to `wanted` as the policies of that direction let it go now."""
    is_up = wanted > current
    rules, default = (behavior.scale_up, _UP_POLICIES) if is_up else (behavior.scale_down, _DOWN_POLICIES)
    if wanted == current or rules.select_policy == "Disabled":
        return current
    reached = [_reached(current, changes, policy, now, is_up=is_up) for policy in rules.policies or default]
    if is_up:
        limit = min(reached) if rules.select_policy == "Min" else max(reached)
        return min(wanted, max(current, limit))
    limit = max(reached) if rules.select_policy == "Min" else min(reached)
    return max(wanted, min(current, limit))


def _window(rules: ScalingRules, default: float) -> float:
    return default if rules.stabilization_window_seconds is None else rules.stabilization_window_seconds


def _within(recommendations: Iterable[Recommendation], now: float, seconds: float) -> list[int]:
    return [each.replicas for each in recommendations if each.at > now - seconds]


def _reached(current: int, changes: Sequence[Change], policy: ScalingPolicy, now: float, *, is_up: bool) -> int:
    """At the end of the policy's period, which ends now, from what there was at its begin."""
    begin = current - sum(change.delta for change in changes if change.at > now - policy.period_seconds)
    most = policy.value if policy.type == "Pods" else math.ceil(begin * policy.value / 100)
    return begin + most if is_up else begin - most
