"""Whether prompts wait for one another at an engine, by the times that they took."""

import random
from collections.abc import Iterable

import pytest

from kvasir_router.service.queueing_evidence import QueueingEvidence

RATE = 1000.0


def after(observations: Iterable[tuple[float, float]], now: float = 0.0) -> QueueingEvidence:
    evidence = QueueingEvidence()
    for work, seconds in observations:
        evidence.observe(work, seconds, 1 / RATE, now)
    return evidence


def test_nothing_is_shown_before_anything_is_seen_and_by_one_observation() -> None:
    assert not after([]).is_queueing
    assert not after([(1000, 1.0)]).is_queueing


def test_times_that_grow_with_the_work_ahead_show_a_queue() -> None:
    source = random.Random(1)
    amounts = [source.uniform(100, 8000) for _ in range(50)]
    assert after((amount, 0.05 + amount / RATE * source.uniform(0.8, 1.2)) for amount in amounts).is_queueing


def test_times_that_do_not_grow_show_none() -> None:
    source = random.Random(1)
    assert not after((source.uniform(25, 8000), source.uniform(0.48, 0.52)) for _ in range(50)).is_queueing


@pytest.mark.parametrize(("growth", "is_queueing"), [(0.51, True), (0.49, False)])
def test_half_of_the_expected_growth_is_enough(growth: float, is_queueing: bool) -> None:
    assert after([(1000, 1.0), (3000, 1.0 + growth * 2000 / RATE)]).is_queueing is is_queueing


def test_works_that_are_alike_leave_the_verdict_as_it_was() -> None:
    evidence = after([(500, 0.5), (1500, 1.5)])
    for second in range(600):
        evidence.observe(1000 + second % 3, 1.0, 1 / RATE, float(second))
    assert evidence.is_queueing


def test_an_engine_that_no_longer_makes_prompts_wait_is_believed_within_a_minute() -> None:
    evidence = after([(500, 0.5), (1500, 1.5)] * 10)
    for second in range(60):
        evidence.observe(500 + 1000 * (second % 2), 0.5, 1 / RATE, float(second))
    assert not evidence.is_queueing
