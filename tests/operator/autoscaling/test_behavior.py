"""Windows, policies and tolerance mean what a HorizontalPodAutoscaler's mean."""

import pytest

from kvasir_operator.api.model import ScalingBehavior, ScalingPolicy, ScalingRules
from kvasir_operator.autoscaling.behavior import (
    Change,
    Recommendation,
    limited,
    returns_of,
    rounded,
    stabilized,
)

DEFAULT = ScalingBehavior()


@pytest.mark.parametrize(
    ("needed", "current", "expected"),
    [
        (10.9, 10, 10),
        (11.0, 10, 10),
        (11.1, 10, 12),
        (9.0, 10, 10),
        (8.9, 10, 9),
        (3.0, 4, 3),
        (0.0, 0, 0),
        (0.1, 0, 1),
    ],
)
def test_a_tenth_more_or_less_changes_nothing(needed, current, expected):
    assert rounded(needed, current) == expected


@pytest.mark.parametrize(("needed", "expected"), [(10.0, 10), (10.01, 11), (9.0, 10), (8.9, 9)])
def test_where_nothing_is_to_spare_a_little_more_is_one_more(needed: float, expected: int) -> None:
    assert rounded(needed, 10, growth_tolerance=0.0) == expected


def past(*pairs):
    return [Recommendation(at, replicas) for at, replicas in pairs]


@pytest.mark.parametrize(
    ("recommendations", "expected"),
    [
        (past((700, 6), (1000, 2)), 2),  # the window is open at its begin
        (past((701, 6), (1000, 2)), 5),
        (past((701, 4), (1000, 2)), 4),
        (past((701, 2), (1000, 8)), 8),  # up at once
    ],
)
def test_down_waits_for_its_window_and_up_does_not(recommendations, expected):
    assert stabilized(recommendations, 5, DEFAULT, now=1000) == expected


@pytest.mark.parametrize(("startup", "expected"), [(5, 60), (60, 60), (61, 61), (300, 300), (301, 300)])
def test_down_waits_for_as_long_as_a_start_takes_and_no_longer_than_a_horizontal_pod_autoscaler(
    startup: float, expected: float
) -> None:
    assert returns_of([], startup, 1).window_seconds == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([Change(0, -1), Change(30, 1)], 150),
        ([Change(0, -1), Change(30, 1), Change(60, 1)], 150),
        ([Change(0, -1), Change(180, 1)], 300),
        ([Change(0, -1), Change(181, 1)], 120),
        ([Change(0, -1), Change(60, 1, ahead_seconds=120)], 300),
        ([Change(0, -1), Change(61, 1, ahead_seconds=120)], 120),
        ([Change(0, -2), Change(200, -1), Change(230, 1)], 150),
        ([Change(0, 1), Change(10, -1), Change(20, -1)], 120),
        ([Change(0, -1), Change(30, 1), Change(900, -1), Change(950, 1)], 200),
        ([Change(0, -1), Change(30, 1), Change(900, -1), Change(1051, 1)], 150),
    ],
)
def test_down_waits_for_as_long_as_the_lulls_that_300_seconds_outlast(changes: list[Change], expected: float) -> None:
    assert returns_of(changes, 120.0, 10).window_seconds == expected


def a_burst(busy_seconds: float, lull_seconds: float) -> list[Change]:
    """Of three replicas, which go a window of 120 s after the need has gone, and the next one's first."""
    shrunk_at = busy_seconds + 120
    grown = [Change(0, 2), Change(15, 1), Change(shrunk_at, -1), Change(shrunk_at + 60, -2)]
    return [*grown, Change(shrunk_at + 60 + lull_seconds, 3)]


@pytest.mark.parametrize(
    ("busy_seconds", "lull_seconds", "expected"),
    [(240, 480, 600), (241, 480, 120), (240, 481, 120), (30, 100, 220), (240, 180, 300)],
)
def test_twice_as_long_where_load_was_gone_again_before_a_replica_served(
    busy_seconds: float, lull_seconds: float, expected: float
) -> None:
    """A start, and as long until what waited meanwhile is worked off: 240 s. Seven were there before."""
    assert returns_of(a_burst(busy_seconds, lull_seconds), 120.0, 10).window_seconds == expected


@pytest.mark.parametrize(("startup", "busy_seconds", "expected"), [(30.0, 90, 600), (30.0, 91, 60)])
def test_the_end_of_load_is_seen_a_minute_later(startup: float, busy_seconds: float, expected: float) -> None:
    changes = [Change(0, 1), Change(busy_seconds + 60, -1), Change(busy_seconds + 600, 1)]
    assert returns_of(changes, startup, 10).window_seconds == expected


@pytest.mark.parametrize(
    ("num_before", "lull_seconds", "expected"),
    [(3, 60, 360), (3, 179, 598), (3, 300, 600), (4, 60, 180), (3, 481, 120)],
)
def test_twice_the_lull_where_brief_bursts_double_the_replicas(
    num_before: int, lull_seconds: float, expected: float
) -> None:
    """They come at odd times, and one lull longer than those before would find all gone."""
    assert returns_of(a_burst(60, lull_seconds), 120.0, num_before + 3).window_seconds == expected


def test_replicas_that_times_between_tokens_ask_for_are_no_burst() -> None:
    *burst, grown = a_burst(60, 60)
    tried = Change(grown.at, grown.delta, is_tried=True)
    assert returns_of([*burst, tried], 120.0, 6).window_seconds == 180


def test_a_window_that_is_asked_for_holds_whatever_a_start_takes() -> None:
    behavior = ScalingBehavior(scale_down=ScalingRules(stabilization_window_seconds=200))
    assert stabilized(past((801, 6), (1000, 2)), 5, behavior, 1000, default_down_seconds=60) == 5
    assert stabilized(past((800, 6), (1000, 2)), 5, behavior, 1000, default_down_seconds=300) == 2
    assert stabilized(past((940, 6), (1000, 2)), 5, DEFAULT, 1000, default_down_seconds=60) == 2
    assert stabilized(past((941, 6), (1000, 2)), 5, DEFAULT, 1000, default_down_seconds=60) == 5


def test_up_takes_the_lowest_of_its_own_window():
    behavior = ScalingBehavior(scale_up=ScalingRules(stabilization_window_seconds=60))
    assert stabilized(past((939, 5), (941, 7), (1000, 9)), 5, behavior, now=1000) == 7


@pytest.mark.parametrize(
    ("wanted", "current", "changes", "expected"),
    [
        (20, 4, [], 8),  # 100 % in 15 s
        (7, 4, [], 7),
        (20, 8, [Change(986, 4)], 8),
        (20, 8, [Change(985, 4)], 16),  # the period is open at its begin
        (1, 8, [], 4),  # 50 % in 60 s
        (1, 4, [Change(941, -4)], 4),
        (1, 4, [Change(940, -4)], 2),
        (1, 5, [], 2),
        (5, 5, [], 5),
    ],
)
def test_default_policies(wanted, current, changes, expected):
    assert limited(wanted, current, changes, DEFAULT, now=1000) == expected


@pytest.mark.parametrize(("select", "up", "down"), [("Max", 8, 2), ("Min", 6, 3), ("Disabled", 4, 4)])
def test_select_policy_chooses_the_faster_the_slower_or_none(select, up, down):
    policies = (ScalingPolicy("Pods", 2, 60), ScalingPolicy("Percent", 100, 60))
    slower = (ScalingPolicy("Pods", 2, 60), ScalingPolicy("Pods", 1, 60))
    behavior = ScalingBehavior(ScalingRules(None, select, policies), ScalingRules(None, select, slower))
    assert limited(50, 4, [], behavior, now=1000) == up
    assert limited(0, 4, [], behavior, now=1000) == down
