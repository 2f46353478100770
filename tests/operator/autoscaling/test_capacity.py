"""What a replica can do, by what it was seen to do."""

from dataclasses import replace

import pytest
from tests.operator.autoscaling.situations import CAPACITY, KNOWN, NOW, load, sample, situation

from kvasir_operator.autoscaling.capacity import (
    NEW_WEIGHT,
    SATURATED_SECONDS,
    Capacity,
    capacity_of,
    is_saturated,
    with_throughput,
)
from kvasir_operator.autoscaling.decide import decide
from kvasir_operator.autoscaling.sample import RoleSample
from kvasir_operator.autoscaling.situation import COLD_SECONDS, Memory

FULL = 100 * SATURATED_SECONDS
"""Uncached tokens of a replica with more to do than it can."""


def with_backlog(*uncached: float, computed: float = 0.0) -> RoleSample:
    replicas = tuple(load(f"pod-{index}", uncached_tokens=tokens) for index, tokens in enumerate(uncached))
    return sample(replicas=replicas, computed_tokens_per_second=computed)


def test_capacity_is_the_median_so_that_one_odd_replica_does_not_count() -> None:
    replicas = [load("a"), load("b", prefill_tokens_per_second=1), load("c", prefill_tokens_per_second=120)]
    assert capacity_of(replicas, None) == Capacity(1000, 100)


def test_capacity_stays_known_while_no_replica_runs_and_until_one_has_prefilled() -> None:
    known = replace(CAPACITY, saturated_tokens_per_second=80)
    assert capacity_of([], known) == known
    assert capacity_of([load("a", prefill_tokens_per_second=None)], known) == known
    assert capacity_of([], None) is None


@pytest.mark.parametrize(("backlogs", "expected"), [((FULL, FULL), True), ((FULL, FULL - 1), False), ((), False)])
def test_replicas_are_saturated_when_none_of_them_keeps_up(backlogs: tuple[float, ...], expected: bool) -> None:
    assert is_saturated(with_backlog(*backlogs), CAPACITY) is expected


def test_without_a_rate_nothing_is_known_of_saturation() -> None:
    assert not is_saturated(with_backlog(FULL), Capacity(1000, None))


def test_what_saturated_replicas_compute_is_what_they_can_and_later_measurements_count_in_part() -> None:
    first = with_throughput(CAPACITY, with_backlog(FULL, FULL, computed=160), was_saturated=True)
    assert first.saturated_tokens_per_second == 80
    second = with_throughput(first, with_backlog(FULL, FULL, computed=100), was_saturated=True)
    assert second.saturated_tokens_per_second == 80 - NEW_WEIGHT * 30


def test_replicas_that_keep_up_tell_at_least_what_they_compute() -> None:
    idle = with_backlog(0, 0, computed=160)
    assert with_throughput(CAPACITY, idle, was_saturated=False) == CAPACITY
    known = replace(CAPACITY, saturated_tokens_per_second=70)
    assert with_throughput(known, idle, was_saturated=False).saturated_tokens_per_second == 80
    known = replace(CAPACITY, saturated_tokens_per_second=90)
    assert with_throughput(known, idle, was_saturated=False) == known


def test_a_saturation_counts_once_it_has_lasted_for_as_long_as_its_rates_and_all_replicas_were_warm() -> None:
    memory = KNOWN
    seen = with_backlog(FULL, FULL, computed=160)
    for later, expected in ((0, None), (COLD_SECONDS - 1, None), (COLD_SECONDS, 80)):
        at = NOW + later
        _, memory = decide(situation(0, 0, now=at, sample=replace(seen, at=at)), memory)
        assert throughput(memory) == expected


def test_over_a_longer_window_a_saturation_must_last_longer() -> None:
    seen = replace(with_backlog(FULL, FULL, computed=160), window_seconds=120.0)
    for ago, expected in ((119, None), (120, 80)):
        _, memory = decide(situation(0, 0, sample=seen), replace(KNOWN, saturated_since=NOW - ago))
        assert throughput(memory) == expected


def test_a_cold_replica_ends_a_saturation() -> None:
    long = replace(KNOWN, saturated_since=NOW - 1000)
    cold = situation(0, 0, ready={"pod-0": 1000.0, "pod-1": 1.0}, sample=with_backlog(FULL, FULL, computed=160))
    _, memory = decide(cold, long)
    assert (memory.saturated_since, throughput(memory)) == (None, None)


def throughput(memory: Memory) -> float | None:
    assert memory.capacity is not None
    return memory.capacity.saturated_tokens_per_second
