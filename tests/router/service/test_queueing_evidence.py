"""Whether prompts wait for one another at an engine, by the times that they took."""

import random
from collections.abc import Iterable

import pytest

from kvasir_router.service.prefill_rate import QueueingEvidence

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
    evidence, source = after([(500, 0.5), (1500, 1.5)]), random.Random(1)
    for number in range(600):
        evidence.observe(1000 + number % 3, source.uniform(0.99, 1.01), 1 / RATE, number / 2)
    assert evidence.is_queueing


def test_an_engine_that_no_longer_makes_prompts_wait_is_believed_within_a_minute() -> None:
    evidence = after([(500, 0.5), (1500, 1.5)] * 10)
    for number in range(120):
        evidence.observe(500 + 1000 * (number % 2), 0.5, 1 / RATE, float(number // 2))
    assert not evidence.is_queueing


@pytest.mark.parametrize(("seconds_later", "is_queueing"), [(2.9, True), (3.0, False)])
def test_prompts_that_were_not_there_together_show_nothing(seconds_later: float, is_queueing: bool) -> None:
    evidence = after([(1000, 1.0)])
    evidence.observe(3000, 3.0, 1 / RATE, seconds_later)
    assert evidence.is_queueing is is_queueing


def test_a_growth_within_what_times_differ_by_shows_none() -> None:
    assert not after([(30, 0.020), (60, 0.025)]).is_queueing


def test_an_engine_that_becomes_slower_just_as_it_gets_more_to_do_shows_no_queue() -> None:
    evidence, source, now = QueueingEvidence(), random.Random(1), 0.0
    for work, seconds in [(30.0, 0.02)] * 200 + [(30.0 * number, 0.5) for number in range(1, 250)]:
        now += 0.002
        evidence.observe(work, seconds + source.uniform(0.0, 0.003), 1 / RATE, now)
        assert not evidence.is_queueing


@pytest.mark.parametrize(("least", "most"), [(100, 2000), (25, 35)])
def test_an_engine_that_cannot_keep_up_shows_a_queue_though_guesses_of_the_work_are_rough(
    least: float, most: float
) -> None:
    """One prompt after another at 16,000 tokens a second, of which 20 % more come."""
    rate, source, evidence = 16_000.0, random.Random(1), QueueingEvidence()
    arrived = done = 0.0
    waiting: list[tuple[float, float]] = []
    for _ in range(500):
        arrived += source.expovariate(1.2 * rate / ((least + most) / 2))
        work = source.uniform(least, most)
        guess = work if source.random() < 0.8 else work * source.uniform(0.3, 2.0)
        done = max(done, arrived) + work / rate
        waiting = [*(one for one in waiting if one[0] > arrived), (done, guess)]
        seconds = done - arrived + source.gauss(0.05, 0.002)
        evidence.observe(sum(guess for _, guess in waiting), seconds, 1 / rate, done)
    assert evidence.is_queueing
