import gc
import random

import pytest

from kvasir_router.service.prefill_rate import CONTEXT_DOUBLING_TOKENS, FleetPrefill, PrefillRate, work


def a_rate(prior: float = 8000.0) -> PrefillRate:
    return FleetPrefill(prior).new_member()


def taught(fleet: FleetPrefill, rate: float, number: int = 20, now: float = 0.0) -> PrefillRate:
    member = fleet.new_member()
    for _ in range(number):
        member.observe(4000, 4000 / rate, now)
    return member


@pytest.mark.parametrize("rate", [300.0, 5000.0, 60_000.0])
def test_finds_the_rate_behind_noisy_observations(rate: float) -> None:
    fit, source = a_rate(), random.Random(1)
    for _ in range(60):
        amount = source.randint(100, 8000)
        fit.observe(amount, 0.03 + amount / rate * source.uniform(0.9, 1.1), now=0.0)
    assert fit.tokens_per_second == pytest.approx(rate, rel=0.25)


def test_prompts_of_one_length_are_enough() -> None:
    fit = a_rate()
    for _ in range(30):
        fit.observe(1000, 2.0, now=0.0)
    assert fit.tokens_per_second == pytest.approx(500, rel=0.1)


def test_short_prompts_show_the_overhead_not_a_slow_engine() -> None:
    fit = a_rate()
    for _ in range(50):
        fit.observe(10, 0.03, now=0.0)
    assert fit.tokens_per_second > 4000


def test_follows_a_change() -> None:
    fit = a_rate()
    for rate in (8000, 1000):
        for _ in range(60):
            fit.observe(4000, 4000 / rate, now=0.0)
    assert fit.tokens_per_second == pytest.approx(1000, rel=0.1)


def test_starts_at_the_prior() -> None:
    assert a_rate(123.0).tokens_per_second == 123.0


def test_stays_in_bounds_when_observations_make_no_sense() -> None:
    fit = a_rate()
    for amount in (10_000, 1, 10_000, 1):
        fit.observe(amount, 1.0 / amount, now=0.0)
    assert 1 <= fit.tokens_per_second <= 1e6
    assert fit.estimate_seconds(100) >= 0


def test_a_token_behind_a_long_context_is_more_work() -> None:
    assert work(100) == pytest.approx(100, rel=0.01)
    assert work(2, int(CONTEXT_DOUBLING_TOKENS) - 1) == pytest.approx(4.0)
    assert work(1000, 500) + work(500) == pytest.approx(work(1500))


def test_a_new_replica_is_taken_for_one_of_its_fleet() -> None:
    fleet = FleetPrefill()
    members = [taught(fleet, rate) for rate in (900.0, 1000.0, 20_000.0)]
    fleet.refresh(now=0.0)
    assert fleet.new_member().tokens_per_second == pytest.approx(members[1].tokens_per_second, rel=0.01)


def test_those_that_know_nothing_do_not_speak_for_the_fleet() -> None:
    fleet = FleetPrefill()
    strangers = [fleet.new_member() for _ in range(5)]
    member = taught(fleet, 1000.0)
    fleet.refresh(now=0.0)
    assert fleet.median_rate == pytest.approx(member.tokens_per_second, rel=0.01)
    assert strangers[0].tokens_per_second == pytest.approx(fleet.median_rate, rel=0.01)


def test_one_bad_sample_is_forgotten_without_traffic() -> None:
    fleet = FleetPrefill()
    others = [taught(fleet, 1000.0) for _ in range(3)]
    unlucky = fleet.new_member()
    unlucky.observe(1000, 60.0, now=0.0)
    assert unlucky.tokens_per_second < 50
    for now in range(600):
        for other in others:
            other.observe(4000, 4.0, float(now))
        fleet.refresh(float(now))
    assert unlucky.tokens_per_second == pytest.approx(1000, rel=0.1)


def test_who_has_seen_enough_is_not_upset_by_one_observation() -> None:
    """A cached prefix that was not there looks like an engine ten times slower."""
    fit = taught(FleetPrefill(), 1000.0)
    fit.observe(4000, 40.0, now=0.0)
    assert fit.tokens_per_second > 800


def test_a_gone_endpoint_leaves_no_trace() -> None:
    fleet = FleetPrefill()
    gone = taught(fleet, 100.0)
    stays = taught(fleet, 1000.0)
    del gone
    gc.collect()
    fleet.refresh(now=0.0)
    assert fleet.median_rate == pytest.approx(stays.tokens_per_second, rel=0.01)


def test_an_answer_in_one_piece_teaches_only_where_it_was_sooner_than_expected() -> None:
    fit = a_rate(1000.0)
    fit.observe_at_most(4000, 60.0, now=0.0)
    assert (fit.num_observations, fit.tokens_per_second) == (0, 1000.0)
    fit.observe_at_most(4000, 1.0, now=0.0)
    assert fit.tokens_per_second > 3000


def test_the_averages_follow_what_is_dispatched() -> None:
    fleet = FleetPrefill()
    member = fleet.new_member()
    for _ in range(400):
        member.note_dispatch(30_000, work(30_000))
    assert member.work_per_token == pytest.approx(work(30_000) / 30_000, rel=0.01)
    assert member.work_per_prompt == pytest.approx(work(30_000), rel=0.01)
    member.note_dispatch(0, 0.0)
