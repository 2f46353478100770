"""Each limit of a replica gives a number of its own, and the largest counts."""

import math
from dataclasses import replace

import pytest
from tests.operator.autoscaling.situations import CAPACITY, load, sample

from kvasir_operator.autoscaling.capacity import Capacity
from kvasir_operator.autoscaling.demand import (
    LEAST_BACKLOG_SECONDS,
    ScalingReason,
    demand_of,
    kv_tokens,
    num_servers_for,
    wait_p90_seconds,
)


def test_kv_demand_is_what_is_used_what_waits_and_what_will_be_generated():
    replicas = (load("pod-0", 100, num_running=4, num_waiting=1, uncached_tokens=30),)
    waiting = sample(replicas=replicas, num_held=2, held_tokens=50, mean_output_tokens=10)
    assert kv_tokens(waiting, 60) == 100 + (30 + 50) + 10 * (1 + 2 + 4 / 2)


@pytest.mark.parametrize(("ending", "at_once"), [(0.05, 1.0), (4 / 60, 1.0), (0.1, 40 / 60), (4.0, 1 / 60)])
def test_of_what_waits_only_that_counts_which_is_in_the_cache_at_once_while_it_is_worked_off(
    ending: float, at_once: float
) -> None:
    replicas = (load("pod-0", 100, num_running=4, uncached_tokens=80),)
    waiting = sample(replicas=replicas, requests_per_second=ending)  # each stays for 4 / ending seconds
    assert kv_tokens(waiting, 60) == pytest.approx(100 + 80 * at_once)


def test_kv_demand_over_the_target_share_of_one_replica():
    need = demand_of(sample(800, 400), CAPACITY, 0.5, None, 60).need
    assert (need.replicas, need.reason) == (1200 / 500, ScalingReason.KV_CACHE_DEMAND)


@pytest.mark.parametrize(("usage", "is_over"), [(950, False), (951, True)])
def test_the_busiest_replica_counts_from_where_it_would_preempt(usage, is_over):
    need = demand_of(sample(usage, 0, 0, 0), CAPACITY, 0.5, None, 60).need
    assert (need.reason is ScalingReason.BUSIEST_REPLICA) is is_over
    if is_over:
        assert need.replicas == pytest.approx(4 * 0.951 / 0.95)


@pytest.mark.parametrize(("num_waiting", "replicas"), [(0, 1.0), (20, 1.125), (160, 2.0)])
def test_requests_that_wait_for_a_place_in_the_batch_call_for_as_many_as_are_computed_at_once(
    num_waiting: int, replicas: float
) -> None:
    """Of short prompts with long answers, which need neither cache nor prefill; each takes 12 s of the next 120."""
    running = (load("pod-0", 100, num_running=16, num_waiting=num_waiting / 2),)
    seen = sample(replicas=running, num_held=num_waiting / 2, requests_per_second=16 / 12)
    demand = demand_of(seen, CAPACITY, 0.5, None, 120, slots=16)
    assert (demand.need.replicas, demand.need.reason) == (pytest.approx(replicas), ScalingReason.SLOT_DEMAND)
    assert demand.lasting_replicas == 1.0
    assert demand_of(seen, CAPACITY, 0.5, None, 120).need.replicas < 1


def test_prefill_demand_without_an_slo_leaves_a_fifth_idle():
    need = demand_of(sample(0, uncached_tokens_per_second=400), CAPACITY, 0.5, None, 60).need
    assert (need.replicas, need.reason) == (400 / 100 / 0.8, ScalingReason.PREFILL_DEMAND)


def test_prefill_demand_with_an_slo_is_what_keeps_waits_short():
    arriving = sample(0, uncached_tokens_per_second=400, mean_uncached_tokens=50)
    assert demand_of(arriving, CAPACITY, 0.5, 1.0, 60).need.replicas == num_servers_for(4.0, 0.5, 0.75)


def test_an_slo_below_the_mean_prefill_is_no_reason_to_grow():
    arriving = sample(0, uncached_tokens_per_second=400, mean_uncached_tokens=200)
    assert demand_of(arriving, CAPACITY, 0.5, 1.0, 60).need.replicas == 5.0


def test_a_backlog_is_worked_off_by_what_serves_beyond_the_load_and_what_is_under_way_is_none():
    arriving = sample(0, uncached_tokens_per_second=80, held_tokens=80 + 3000)
    roomy = Capacity(1e9, 100)
    without = demand_of(replace(arriving, held_tokens=80), roomy, 0.5, 1.0, 60)
    assert without.need.replicas == num_servers_for(0.8, 0.0, 1.0)
    assert demand_of(arriving, roomy, 0.5, 1.0, 60).need.replicas == pytest.approx(0.8 + 3000 / 100 / 60)
    few = replace(arriving, held_tokens=80 + 6)
    assert demand_of(few, roomy, 0.5, 1.0, 60).need.replicas == without.need.replicas


def test_what_waits_does_not_last():
    waiting = sample(100, uncached_tokens_per_second=40, held_tokens=1e6)
    demand = demand_of(waiting, CAPACITY, 0.5, None, 60)
    assert demand.need.replicas > 100
    assert demand.lasting_replicas == 40 / 100 / 0.8
    assert demand_of(sample(900, held_tokens=1e6), CAPACITY, 0.5, None, 60).lasting_replicas == 900 / 500


def test_without_a_measured_prefill_rate_only_the_cache_counts():
    unmeasured = Capacity(1000, None)
    assert demand_of(sample(100, uncached_tokens_per_second=1e9), unmeasured, 0.5, 1.0, 60).need.replicas == 0.2


def test_a_backlog_is_worked_off_while_a_replica_would_start_and_no_faster_than_in_half_a_minute():
    waiting, roomy = sample(0, held_tokens=3000), Capacity(1e9, 100)
    assert demand_of(waiting, roomy, 0.5, 1.0, 300).need.replicas == 0.1
    assert demand_of(waiting, roomy, 0.5, 1.0, 5).need.replicas == 30 / LEAST_BACKLOG_SECONDS


def test_what_replicas_were_seen_to_compute_at_most_bounds_what_they_are_taken_to():
    arriving = sample(0, uncached_tokens_per_second=400, mean_uncached_tokens=50)
    tried = replace(CAPACITY, saturated_tokens_per_second=50)
    assert demand_of(arriving, tried, 0.5, 1.0, 60).need.replicas == 400 / 50 / 0.8
    better = replace(CAPACITY, saturated_tokens_per_second=1000)
    assert demand_of(arriving, better, 0.5, 1.0, 60).need.replicas == num_servers_for(4.0, 0.5, 0.75)
    waiting = sample(0, held_tokens=3000)
    roomy = Capacity(1e9, 100, 50)
    assert demand_of(waiting, roomy, 0.5, 1.0, 60).need.replicas == pytest.approx(3000 / 60 / 50)


@pytest.mark.parametrize(("growth", "arriving"), [(80.0, 150 + 80), (50.0, 200), (0.0, 200), (-60.0, 200)])
def test_a_queue_that_grows_tells_of_arrivals_before_their_rate_does(growth: float, arriving: float) -> None:
    """Of 300 tokens/s computed in all a queue that does not grow tells nothing."""
    roomy = Capacity(1e9, 100)
    computed = 150.0 if growth > 0 else 300.0
    waiting = sample(0, held_tokens=2000, uncached_tokens_per_second=200, computed_tokens_per_second=computed)
    ahead = 2000 + arriving * 60 - 100 * 60
    need = demand_of(waiting, roomy, 0.5, None, 60, backlog_growth=growth).need
    assert need.replicas == pytest.approx((arriving + ahead / 60) / 100)


@pytest.mark.parametrize(("held", "is_queue"), [(200, False), (201, True)])
def test_what_is_under_way_within_the_slo_does_not_grow_a_queue(held: float, is_queue: bool) -> None:
    seen = sample(0, held_tokens=held, uncached_tokens_per_second=200, computed_tokens_per_second=200)
    steady = demand_of(seen, Capacity(1e9, 100), 0.5, 1.0, 60).need.replicas
    growing = demand_of(seen, Capacity(1e9, 100), 0.5, 1.0, 60, backlog_growth=100).need.replicas
    assert (growing > steady) is is_queue


def test_one_server_waits_as_m_m_1_does():
    # P(W > t) = rho exp(-(1 - rho) t / s), so that one of ten waits longer than ln(10 rho) s / (1 - rho).
    assert wait_p90_seconds(1, 0.5, 2.0) == pytest.approx(math.log(5) * 2.0 / 0.5)


def test_nobody_of_nine_in_ten_waits_where_fewer_than_one_in_ten_is_delayed():
    assert wait_p90_seconds(1, 0.1, 2.0) == 0.0
    assert wait_p90_seconds(1, 0.11, 2.0) > 0.0


@pytest.mark.parametrize("load", [2.0, 2.1])
def test_a_queue_that_only_grows_has_no_end(load):
    assert wait_p90_seconds(2, load, 1.0) == math.inf


def test_the_fewest_servers_are_found():
    needed = num_servers_for(4.0, 1.0, 2.0)
    assert needed is not None
    assert wait_p90_seconds(needed, 4.0, 1.0) <= 1.0 < wait_p90_seconds(needed - 0.02, 4.0, 1.0)


def test_many_servers_may_run_hotter_than_few():
    few, many = num_servers_for(1.0, 1.0, 2.0), num_servers_for(16.0, 1.0, 2.0)
    assert few is not None
    assert many is not None
    assert 1.0 / few < 16.0 / many


def test_no_load_needs_no_server():
    assert num_servers_for(0.0, 1.0, 2.0) == 0.0


def test_no_number_helps_where_being_served_takes_too_long():
    assert num_servers_for(1.0, 2.0, 2.0) is None
    assert num_servers_for(1.0, 1.9, 2.0) is not None
