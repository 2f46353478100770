"""The seams of rules: one object a run, asked at its own interval for how many replicas it wants.

A `Rule` counts one role. `Rules` count all roles of a service at once, as kvasir does, or each by a rule of its own.
"""

from collections.abc import Mapping
from typing import Protocol

from benchmarks.autoscaling.view import FleetView


class Rule(Protocol):
    @property
    def interval_seconds(self) -> float: ...

    def wanted(self, view: FleetView) -> int: ...


class Rules(Protocol):
    @property
    def interval_seconds(self) -> float:
        """Until they are asked again; may change."""

    def wanted(self, views: Mapping[str, FleetView]) -> Mapping[str, int]:
        """By role."""


class EachRole:
    """A rule for each role, none of which knows of the others."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules

    @property
    def interval_seconds(self) -> float:
        return min(rule.interval_seconds for rule in self._rules.values())

    def wanted(self, views: Mapping[str, FleetView]) -> Mapping[str, int]:
        return {role: rule.wanted(views[role]) for role, rule in self._rules.items()}


class ToZero:
    """Around a rule that leaves one: none after `idle_seconds` without a request in flight, one on a held request.

    As KEDA's cooldown and activation, polled every interval of the rule, and as the WVA's, which polls ten times a
    second at zero (`asleep_seconds`).
    """

    def __init__(self, rule: Rule, idle_seconds: float, asleep_seconds: float | None = None) -> None:
        self._rule = rule
        self._idle_seconds = idle_seconds
        self._asleep_seconds = asleep_seconds or rule.interval_seconds
        self._active_at = 0.0
        self._is_asleep = False

    @property
    def interval_seconds(self) -> float:
        return self._asleep_seconds if self._is_asleep else self._rule.interval_seconds

    def wanted(self, view: FleetView) -> int:
        if view.is_busy:
            self._active_at = view.now
        if not view.wanted:
            self._is_asleep = not view.num_held
            return int(view.num_held > 0)
        self._is_asleep = view.now - self._active_at >= self._idle_seconds
        return 0 if self._is_asleep else self._rule.wanted(view)


def within(replicas: float, most: int) -> int:
    return min(max(int(replicas), 1), most)
