"""Others' rules by worked examples, with the figures of their sources: kubernetes' replica_calculator.go, KEDA's
AverageValue, AIBrix' kpa.go and context.go, the WVA's saturation analyzer, llm-d's token-aware guide and Dynamo's
load_scaling.py."""

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.autoscaling.rivals import aibrix, dynamo, hpa, llm_d, wva
from benchmarks.autoscaling.view import FleetView, ReplicaView
from benchmarks.routing.engine import EngineModel

MOST = 24
MODEL = EngineModel(2000.0, 32768.0, 100_000, 128, 0.025, 2e-7)


def replica(kv_usage: float = 0.0, waiting: float = 0.0, uncached: float = 0.0, step_seconds: float = 0.03) -> Any:
    kv_tokens = 100_000 * kv_usage
    return ReplicaView(
        "pod", 600.0, kv_tokens, kv_tokens, kv_tokens, 100_000, 1.0, waiting, waiting, uncached, uncached, 2000.0,
        step_seconds,
    )  # fmt: skip


def view(*replicas: ReplicaView, wanted: int | None = None, now: float = 1000.0, **fields: Any) -> FleetView:
    values: dict[str, Any] = {
        "num_held": 0, "held_tokens": 0, "finished_per_second": 1.0, "uncached_tokens_per_second": 0.0,
        "mean_uncached_tokens": 0.0, "mean_output_tokens": 100.0, "ttft_p90": None, "itl_p90": None,
    }  # fmt: skip
    return FleetView(now, len(replicas) if wanted is None else wanted, replicas, **values | fields)


@pytest.mark.parametrize(
    ("usages", "current", "wanted"),
    [
        ([0.8] * 4, 4, 4),
        ([0.88] * 4, 4, 4),  # a ratio of 1.1 is within the tolerance
        ([0.89] * 4, 4, 5),
        ([0.72] * 4, 4, 4),  # and so is 0.9
        ([0.7] * 10, 10, 9),
        ([1.0, 1.0], 2, 3),
        ([1.0, 1.0], 4, 4),  # those that start count as unused: 2.5 of 4 would turn it round
        ([1.6, 1.6], 3, 4),
        ([0.2, 0.2], 4, 3),  # and as on target where it shrinks: 0.5 and 2 more
        ([], 2, 2),
    ],
)
def test_an_hpa_counts_pods_by_their_mean_ratio_to_the_target(usages: list[float], current: int, wanted: int) -> None:
    assert hpa.replicas_for_pods(usages, 0.8, current) == wanted


@pytest.mark.parametrize(
    ("total", "current", "wanted"), [(0, 3, 0), (5, 1, 1), (5.5, 1, 1), (5.6, 1, 2), (11, 2, 2), (12, 2, 3), (30, 2, 6)]
)
def test_keda_counts_the_queue_over_its_threshold_of_5(total: float, current: int, wanted: int) -> None:
    assert hpa.replicas_for_average(total, 5, current) == wanted


def test_what_the_router_holds_is_queue_too() -> None:
    assert hpa.KedaOnQueueLength(5, MOST).wanted(view(replica(waiting=4), num_held=6)) == 2


def test_an_hpa_grows_by_twice_or_4_pods_in_15_seconds() -> None:
    pace = hpa.Pace(MOST)
    assert pace.follow(20, view(replica(), replica())) == 6
    assert pace.follow(20, view(wanted=6, now=1010.0)) == 6
    assert pace.follow(20, view(wanted=6, now=1015.0)) == 12


def test_an_hpa_shrinks_to_the_most_of_300_seconds() -> None:
    pace = hpa.Pace(MOST)
    assert pace.follow(5, view(wanted=8, now=0.0)) == 8 - 3
    assert pace.follow(2, view(wanted=5, now=285.0)) == 5
    assert pace.follow(2, view(wanted=5, now=299.0)) == 5
    assert pace.follow(2, view(wanted=5, now=300.0)) == 2


def test_aibrix_follows_the_mean_of_180_seconds() -> None:
    rule = aibrix.AibrixKpa(0.5, MOST)
    assert rule.wanted(view(replica(0.5), replica(0.5), now=0.0)) == 2
    assert rule.wanted(view(replica(0.8), replica(0.8), now=15.0)) == 3  # 1.3 on average
    assert rule.wanted(view(replica(0.8), replica(0.8), now=190.0)) == 4  # 1.6, without the first


def test_aibrix_grows_to_twice_at_most_and_panics_from_twice_the_ready_on() -> None:
    rule = aibrix.AibrixKpa(0.5, MOST)
    assert rule.wanted(view(replica(1.9), replica(1.9), now=0.0)) == 4
    idle = view(*[replica(0.1)] * 4, now=0.0)
    assert rule.wanted(replace(idle, now=179.0)) == 4
    assert rule.wanted(replace(idle, now=481.0)) == 2  # after a stable window and 300 s, by half at most


def test_aibrix_does_not_panic_below_twice() -> None:
    rule = aibrix.AibrixKpa(0.5, MOST)
    assert rule.wanted(view(*[replica(0.75)] * 4, now=0.0)) == 6  # 1.5 times
    idle = view(*[replica(0.0)] * 4, now=61.0)
    assert rule.wanted(idle) == 4  # for 300 s no fewer, whatever it wants
    assert rule.wanted(replace(idle, now=300.0)) == 3  # that it has wanted since; in panic it would have been 6


@pytest.mark.parametrize(
    ("kv", "queue", "wanted"),
    [
        (0.7, 0, 3),  # spare of a tenth is enough
        (0.71, 0, 4),
        (0.4, 2, 3),  # and so is one of 3 in the queue
        (0.4, 3, 4),
        (0.8, 0, 4),  # all are saturated
        (0.4, 5, 4),
        (0.46, 0, 2),  # on two it is 0.69
        (0.47, 0, 3),
        (0.1, 1, 2),
        (0.1, 1.5, 3),  # on two 2.25
    ],
)
def test_the_wva_wants_one_more_or_less_by_its_spare(kv: float, queue: float, wanted: int) -> None:
    rule = wva.WvaSaturation(0.8, MOST)
    assert rule.wanted(view(*[replica(kv, queue)] * 3)) == wanted


def test_the_wva_leaves_saturated_replicas_out_and_waits_while_some_are_pending() -> None:
    rule = wva.WvaSaturation(0.8, MOST)
    assert rule.wanted(view(replica(0.9), replica(0.3), replica(0.3))) == 2
    assert rule.wanted(view(replica(0.9), wanted=2)) == 2
    assert rule.wanted(view(replica(0.1))) == 1


@pytest.mark.parametrize(
    ("uncached", "kv", "wanted"),
    [
        (9000.0, 0.0, 3),  # of 3000 tokens each: 2000 a second, for 1.5 s
        (9001.0, 0.0, 3),
        (9901.0, 0.0, 4),  # beyond the HPA's tolerance
        (0.0, 0.9, 4),  # 2.7 of 0.8 each
        (0.0, 0.8, 3),
    ],
)
def test_llm_d_counts_uncached_tokens_and_kv_use(uncached: float, kv: float, wanted: int) -> None:
    rule = llm_d.LlmdTokenAware(1.5, 2000.0, MOST)
    assert rule.wanted(view(*[replica(kv, uncached=uncached / 3)] * 3)) == wanted


def test_llm_d_counts_what_is_held() -> None:
    assert llm_d.LlmdTokenAware(1.5, 2000.0, MOST).wanted(view(replica(), held_tokens=9000)) == 3


def planner() -> dynamo.DynamoLoadPlanner:
    """An SLA of 2 s and 100 ms. A prompt of 1000 tokens takes half a second."""
    return dynamo.DynamoLoadPlanner(2.0, 0.1, MODEL, MOST)


BUSY, LAZY = replica(uncached=3001), replica(uncached=2999)  # 2.0 s with a further prompt


@pytest.mark.parametrize(
    ("replicas", "wanted"),
    [
        ((BUSY, BUSY), 3),
        ((BUSY, LAZY), 2),  # not all are over
        ((replica(step_seconds=0.11),) * 2, 3),
        ((BUSY, replica(step_seconds=0.11)), 2),  # each over another
        ((replica(uncached=1199),) * 2, 1),  # twice as much queues 1.199 s of 1.2, four fifths of 1.5
        ((replica(uncached=1201),) * 2, 2),
        ((replica(step_seconds=0.079),) * 2, 1),
        ((replica(step_seconds=0.081),) * 2, 2),
        ((replica(0.3, step_seconds=0.073),) * 2, 1),  # reads 30 000 more: 6 ms
        ((replica(0.3, step_seconds=0.075),) * 2, 2),
        ((replica(0.5),) * 2, 2),  # would not fit
        ((replica(),), 1),
    ],
)
def test_dynamo_adds_when_all_are_over_and_takes_when_the_rest_would_be_well_below(
    replicas: tuple[ReplicaView, ...], wanted: int
) -> None:
    assert planner().wanted(view(*replicas, mean_uncached_tokens=1000.0)) == wanted


def test_dynamo_waits_while_a_replica_is_pending() -> None:
    assert planner().wanted(view(BUSY, BUSY, wanted=3)) == 3
