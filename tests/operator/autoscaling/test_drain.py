"""How long what waits will wait."""

import math
from dataclasses import replace

import pytest
from tests.operator.autoscaling.situations import NOW, load, sample

from kvasir_operator.autoscaling.drain import (
    KEPT_SECONDS,
    LEAST_GROWTH_SECONDS,
    Backlog,
    backlog_growth,
    drain_seconds,
    is_passing,
    is_waited_for,
    queue_ahead,
    queued_tokens,
    with_backlog,
)
from kvasir_operator.autoscaling.sample import RoleSample

WINDOW_SECONDS = 60.0


def queue(waiting: float, arriving: float = 100, computed: float = 150, ttft_p90: float | None = None) -> RoleSample:
    """Half of it in the router."""
    replica = load("pod-0", uncached_tokens=waiting / 2)
    return sample(
        replicas=(replica,),
        held_tokens=waiting / 2,
        uncached_tokens_per_second=arriving,
        computed_tokens_per_second=computed,
        time_to_first_token_p90=ttft_p90,
    )


@pytest.mark.parametrize(("waiting", "queued"), [(200, 0), (201, 1)])
def test_what_is_under_way_within_the_slo_is_no_queue(waiting: float, queued: float) -> None:
    assert queued_tokens(queue(waiting), ttft_seconds=2) == queued


def test_a_queue_ends_as_it_was_worked_off_lately() -> None:
    assert drain_seconds(queue(1000, arriving=100, computed=150)) == 20
    assert drain_seconds(queue(1000, arriving=100, computed=100)) == math.inf


@pytest.mark.parametrize(("waiting", "expected"), [(6000, True), (6001, False)])
def test_a_queue_that_is_gone_before_a_replica_could_serve_passes(waiting: float, expected: bool) -> None:
    assert is_passing(queue(waiting), 1, NOW, NOW, startup_seconds=120) is expected


@pytest.mark.parametrize(
    ("ago", "ttft_p90", "expected"),
    [
        (WINDOW_SECONDS - 1, None, True),
        (WINDOW_SECONDS, None, False),
        (WINDOW_SECONDS + 4, 5.0, True),
        (WINDOW_SECONDS + 5, 5.0, False),
    ],
)
def test_a_queue_that_has_gone_is_seen_for_a_window_and_its_longest_wait(
    ago: float, ttft_p90: float | None, expected: bool
) -> None:
    assert is_passing(queue(0, ttft_p90=ttft_p90), 1, NOW - ago, NOW, 120) is expected


@pytest.mark.parametrize(("ago", "expected"), [(119, True), (120, False)])
def test_over_a_longer_window_a_queue_that_has_gone_is_seen_for_longer(ago: float, expected: bool) -> None:
    assert is_passing(replace(queue(0), window_seconds=120.0), 1, NOW - ago, NOW, 120) is expected


def test_where_no_slo_asks_for_it_and_where_nothing_waited_nothing_passes() -> None:
    assert not is_passing(queue(1000), None, NOW, NOW, 120)
    assert not is_passing(queue(0), 1, None, NOW, 120)


@pytest.mark.parametrize(
    ("starting", "expected"),
    [((), 500 + 300 * 60 - 100 * 60), ((60,), 12500), ((20,), 12500 - 100 * 40), ((20, 20, 0), 12500 - 100 * 140)],
)
def test_a_queue_grows_by_what_replicas_and_those_on_their_way_do_not_compute(
    starting: tuple[float, ...], expected: float
) -> None:
    ahead = queue_ahead(500, arriving=300, rate=100, num_serving=1, starting=starting, ahead_seconds=60)
    assert ahead == max(0, expected)


def held(*moments: tuple[float, float]) -> tuple[Backlog, ...]:
    """(seconds ago, tokens in routers)"""
    return tuple(Backlog(NOW - ago, tokens) for ago, tokens in moments)


@pytest.mark.parametrize(
    ("tokens", "growth"),
    [
        ((0, 450, 900), 30),
        ((0, 150, 900), 20),  # twice that of the first half
        ((0, 750, 900), 20),  # twice that of the second
        ((0, 300, 900), 30),
        ((0, 600, 900), 30),
        ((0, 0, 30_000), 0),
        ((0, 30_000, 30_000), 0),
        ((0, 30_000, 28_500), -200),
    ],
)
def test_growth_is_what_both_halves_show_and_a_batch_is_none(tokens: tuple[float, ...], growth: float) -> None:
    assert backlog_growth(held(*zip((30, 15, 0), tokens, strict=True))) == growth


@pytest.mark.parametrize(
    ("agos", "growth"),
    [
        ((0,), 0),
        ((15, 0), 0),
        ((2 * LEAST_GROWTH_SECONDS, LEAST_GROWTH_SECONDS, 0), 100),
        ((2 * LEAST_GROWTH_SECONDS, LEAST_GROWTH_SECONDS - 1, 0), 0),
        ((2 * LEAST_GROWTH_SECONDS - 1, LEAST_GROWTH_SECONDS, 0), 0),
        ((60, 30, 0), 100),
        ((45, 30, 15, 10, 5, 0), 100),
    ],
)
def test_growth_is_seen_over_two_halves_of_ten_seconds_or_a_scrape(agos: tuple[float, ...], growth: float) -> None:
    assert backlog_growth(held(*((ago, 9000 - 100 * ago) for ago in agos))) == growth


def test_the_latest_growth_counts() -> None:
    assert backlog_growth(held((45, 90_000), (30, 0), (15, 1500), (0, 3000))) == 100


def test_moments_are_kept_for_two_minutes() -> None:
    past = held((KEPT_SECONDS + 1, 9000), (KEPT_SECONDS, 0), (15, 700))
    backlogs = with_backlog(past, queue(1000), {"pod-0", "pod-1"})
    assert backlogs == (*past[1:], Backlog(NOW, 500, {"pod-0": 500}, frozenset({"pod-1"})))


def test_a_replica_that_served_unseen_has_not_grown_by_what_it_has() -> None:
    unseen = frozenset({"pod-1"})
    first = Backlog(NOW - 30, 0, {"pod-0": 6000, "gone": 50}, unseen)
    last = Backlog(NOW, 300, {"pod-0": 6000, "pod-1": 6000})
    for middle in (Backlog(NOW - 15, 150, {"pod-0": 6000}, unseen), replace(last, at=NOW - 15, held=150)):
        assert backlog_growth((first, middle, last)) == 10


def test_what_a_replica_has_that_serves_only_now_came_from_routers_or_has_arrived() -> None:
    assert backlog_growth((*held((30, 3000), (15, 6000)), Backlog(NOW, 0, {"pod-0": 9000}))) == 200


def test_a_sample_that_is_seen_twice_counts_once() -> None:
    assert with_backlog(held((0, 700)), queue(1000), {"pod-0"}) == (Backlog(NOW, 500, {"pod-0": 500}),)


@pytest.mark.parametrize(
    ("tokens", "own_seconds", "is_waited"),
    [((0, 0), 2.0, False), ((300, 0), 2.0, False), ((500, 300), 2.0, True), ((500, 300), 5.0, False)],
)
def test_prompts_wait_where_more_of_them_are_there_than_arrive_in_their_own_time(
    tokens: tuple[float, float], own_seconds: float, is_waited: bool
) -> None:
    backlogs = held((61, 90_000), (15, tokens[0]), (0, tokens[1]))
    arriving = replace(queue(0), uncached_tokens_per_second=100.0)
    assert is_waited_for(backlogs, arriving, own_seconds) is is_waited
