"""The decision about one role: holding, waking, shrinking, growing, and what it remembers."""

from dataclasses import replace

import pytest
from tests.operator.autoscaling.situations import KNOWN, NOW, load, sample, situation, slo, spec

from kvasir_operator.api.model import ScalingBehavior, ScalingRules
from kvasir_operator.api.quantity import Duration
from kvasir_operator.autoscaling.behavior import GAP_SECONDS, Change, Recommendation
from kvasir_operator.autoscaling.capacity import Capacity
from kvasir_operator.autoscaling.decide import STALE_SECONDS, decide
from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.drain import Backlog
from kvasir_operator.autoscaling.forecast import History, PastNeed
from kvasir_operator.autoscaling.latency import GIVE_UP_SECONDS, Trial
from kvasir_operator.autoscaling.situation import COLD_SECONDS, HoldReason, Memory
from kvasir_operator.autoscaling.together import decide_together, idle_seconds, noting_idleness

AT_ONCE = ScalingBehavior(scale_down=ScalingRules(stabilization_window_seconds=0))
SHRINKING = spec(behavior=AT_ONCE)


def replicas_of(given, memory=KNOWN):
    return decide(given, memory)[0].replicas


@pytest.mark.parametrize(("kv", "expected"), [((500, 500), 2), ((550, 550), 2), ((551, 550), 3)])
def test_grows_when_demand_is_over_what_all_hold_at_the_target(kv, expected):
    assert replicas_of(situation(*kv)) == expected


def test_says_what_it_rests_on():
    verdict, _ = decide(situation(800, 800), KNOWN)
    assert (verdict.replicas, verdict.reason, verdict.needed) == (4, ScalingReason.KV_CACHE_DEMAND, 3.2)
    assert verdict.message == "demand of 1600 KV tokens, a replica has 1000 at target 0.5"


def test_replicas_on_their_way_are_not_wanted_twice():
    assert replicas_of(situation(800, 800, current=4)) == 4


def test_shrinks_to_what_demand_needs():
    assert replicas_of(situation(100, 100, 100, 100, spec=SHRINKING)) == 2  # half, as the policy has it
    assert replicas_of(situation(250, 250, 250, 250, spec=SHRINKING)) == 2
    assert replicas_of(situation(251, 250, 250, 250, spec=SHRINKING)) == 3


def test_who_shrinks_says_of_need_window_and_survivors() -> None:
    limits = spec(slo=slo(itl="1s"))
    replicas = (load("pod-0", 300, num_running=4), *(load(f"pod-{index}", 100) for index in (1, 2, 3)))
    seen = sample(replicas=replicas, inter_token_latency_p90=0.2)
    memory = replace(KNOWN, recommendations=(Recommendation(NOW - 60, 4), Recommendation(NOW - 30, 2)))
    given = situation(*[0] * 4, spec=limits, sample=seen, startup_seconds=60.0, slots=16)
    verdict, _ = decide(given, memory)
    assert (verdict.replicas, verdict.reason) == (2, ScalingReason.LOW_DEMAND)
    assert verdict.message == (
        "demand of 600 KV tokens, a replica has 1000 at target 0.5: 1.20 replicas; at most 2 wanted in the last 60 s; "
        "the busiest of 4 uses 0.30 of its KV cache, 0.60 with 2; one runs 4 of 16 requests at once; "
        "InterTokenLatency p90 of 0.200 s, 0.40 of its SLO with 2"
    )


def test_replicas_that_do_not_serve_yet_are_let_go_by_need_and_window_alone() -> None:
    verdict, _ = decide(situation(current=3, spec=SHRINKING), KNOWN)
    assert verdict.message.endswith(": 0.00 replicas; at most 1 wanted in the last 0 s")


@pytest.mark.parametrize(
    ("kv", "limits", "expected", "reason"),
    [
        ((500, 500, 500), spec(1, 2), 2, ScalingReason.BOUNDS),
        ((500, 500, 500), spec(1, 2, behavior=AT_ONCE), 2, ScalingReason.BOUNDS),
        ((400, 300, 300), spec(1, 2, behavior=AT_ONCE), 2, ScalingReason.LOW_DEMAND),
        ((100,), spec(3), 3, ScalingReason.BOUNDS),
        ((100, 100), spec(3), 3, ScalingReason.BOUNDS),
        ((500, 450), spec(3), 3, ScalingReason.BOUNDS),
        ((800, 700), spec(3), 3, ScalingReason.KV_CACHE_DEMAND),
        ((800, 800), spec(3), 4, ScalingReason.KV_CACHE_DEMAND),
        ((800, 800), spec(1, 3), 3, ScalingReason.KV_CACHE_DEMAND),
    ],
)
def test_what_only_the_bounds_ask_for_is_told_as_theirs(kv, limits, expected, reason) -> None:
    verdict, _ = decide(situation(*kv, spec=limits), KNOWN)
    assert (verdict.replicas, verdict.reason) == (expected, reason)
    if reason is ScalingReason.BOUNDS:
        assert verdict.message.startswith(
            f"minReplicas {limits.min_replicas}, maxReplicas {limits.max_replicas}; demand"
        )


def test_bounds_that_hold_while_nothing_is_known_say_what_is_not() -> None:
    verdict, _ = decide(situation(current=5, sample=None, trouble="no answer", spec=spec(1, 4)), Memory())
    assert (verdict.reason, verdict.message) == (ScalingReason.BOUNDS, "minReplicas 1, maxReplicas 4; no answer")


def test_shrinking_waits_for_its_window():
    given = situation(100, 100, 100, 100, startup_seconds=200.0)
    lower = Recommendation(NOW - 15, 1)
    memory = replace(KNOWN, recommendations=(Recommendation(NOW - 199, 4), lower))
    assert replicas_of(given, memory) == 4
    memory = replace(KNOWN, recommendations=(Recommendation(NOW - 200, 4), lower))
    assert replicas_of(given, memory) == 2
    assert replicas_of(given, replace(memory, changes=(Change(NOW - 900, -1), Change(NOW - 899, 1)))) == 4


@pytest.mark.parametrize(("ago", "expected"), [(GAP_SECONDS, 4), (GAP_SECONDS + 1, 8)])
def test_after_a_hold_the_window_begins_anew(ago: float, expected: int) -> None:
    given = situation(*[50] * 8, startup_seconds=60.0)
    memory = replace(KNOWN, recommendations=(Recommendation(NOW - 60, 8), Recommendation(NOW - ago, 2)))
    assert replicas_of(given, memory) == expected


def test_one_low_sample_after_a_rollout_as_long_as_the_window_shrinks_nothing() -> None:
    memory = replace(KNOWN, recommendations=tuple(Recommendation(NOW - 130 - ago, 8) for ago in (60, 45, 30, 15, 0)))
    given = situation(*[50] * 8, startup_seconds=120.0)
    _, memory = decide(replace(given, is_rolling=True), memory)
    for later, expected in ((0, 8), *((each, 8) for each in range(15, 120, 15)), (120, 4)):
        at = NOW + later
        verdict, memory = decide(replace(given, now=at, sample=replace(sample(*[50] * 8), at=at)), memory)
        assert (later, verdict.replicas) == (later, expected)


@pytest.mark.parametrize("turn_seconds", [GAP_SECONDS, GAP_SECONDS + 1, 130])
def test_turns_that_are_far_apart_shrink_a_role_after_its_window_too(turn_seconds: int) -> None:
    given, memory = situation(*[50] * 8, startup_seconds=120.0, turn_seconds=turn_seconds), KNOWN
    for later in range(0, 120 + turn_seconds, turn_seconds):
        at = NOW + later
        verdict, memory = decide(replace(given, now=at, sample=replace(sample(*[50] * 8), at=at)), memory)
        assert (later, verdict.replicas) == (later, 8 if later < 120 else 4)


@pytest.mark.parametrize(("ago", "expected"), [(100, 4), (101, 8)])
def test_after_two_of_such_turns_without_a_decision_the_window_begins_anew(ago: float, expected: int) -> None:
    given = situation(*[50] * 8, startup_seconds=60.0, turn_seconds=50.0)
    assert replicas_of(given, replace(KNOWN, recommendations=(Recommendation(NOW - ago, 2),))) == expected


def test_a_role_seen_first_does_not_shrink_at_once():
    assert replicas_of(situation(100, 100, 100, 100)) == 4


def test_changes_and_recommendations_are_remembered():
    _, memory = decide(situation(800, 800), KNOWN)
    assert memory.changes == (Change(NOW, 2),)
    assert memory.recommendations[-1] == Recommendation(NOW, 4)
    _, memory = decide(situation(800, 800, current=4), memory)
    assert memory.changes == (Change(NOW, 2),)


@pytest.mark.parametrize(("busiest", "expected"), [(633, 2), (634, 3)])
def test_survivors_must_hold_the_busiest_replicas_part(busiest, expected):
    # Three to two: its share grows by a half, and 0.95 is the most.
    given = situation(busiest, 100, 100, spec=replace(SHRINKING, target_kv_cache_usage=0.9))
    assert replicas_of(given) == expected


def test_survivors_must_hold_what_is_in_flight_now_and_not_only_the_minutes_mean():
    replicas = tuple(load(f"pod-{index}", 10, kv_used_tokens_now=500) for index in range(2))
    given = situation(10, 10, spec=SHRINKING)
    assert replicas_of(replace(given, sample=sample(replicas=replicas))) == 2
    replicas = tuple(load(f"pod-{index}", 10, kv_used_tokens_now=475) for index in range(2))
    assert replicas_of(replace(given, sample=sample(replicas=replicas))) == 1


@pytest.mark.parametrize(("num_running", "expected"), [(10, 2), (11, 3)])
def test_survivors_must_have_places_in_the_batch_for_the_busiest_replicas_part(num_running: int, expected: int) -> None:
    # Three to two: its share grows by a half, and 16 is the most.
    replicas = (load("pod-0", 10, num_running=num_running), load("pod-1", 10), load("pod-2", 10))
    given = situation(10, 10, 10, spec=SHRINKING, sample=sample(replicas=replicas), slots=16)
    verdicts = [replicas_of(replace(given, slots=slots)) for slots in (16, None)]
    assert verdicts == [expected, 1]


def test_a_role_that_falls_behind_for_want_of_places_in_the_batch_grows() -> None:
    """Two requests a second come and 16 places finish four in three seconds; nothing else is scarce."""
    for num_waiting, expected in ((10, 1), (40, 2)):
        replicas = (load("pod-0", 10, num_running=16, num_waiting=num_waiting),)
        seen = sample(replicas=replicas, requests_per_second=16 / 12)
        verdict, _ = decide(situation(10, sample=seen, slots=16), KNOWN)
        assert verdict.replicas == expected
    assert verdict.reason is ScalingReason.SLOT_DEMAND


@pytest.mark.parametrize(("itl", "expected"), [(0.5, 2), (0.51, 3), (0.8, 4)])
def test_survivors_must_keep_the_slo(itl, expected):
    seen = sample(10, 10, 10, 10, inter_token_latency_p90=itl)
    given = situation(10, 10, 10, 10, spec=replace(SHRINKING, slo=slo(itl="1s")), sample=seen)
    assert replicas_of(given) == expected


def test_replicas_on_their_way_are_let_go_where_demand_fell_and_not_where_the_slo_waits_for_them() -> None:
    given = situation(10, 10, current=3, spec=replace(SHRINKING, slo=slo(itl="1s")))
    assert replicas_of(given) == 1
    waiting = sample(10, 10, inter_token_latency_p90=1.5)
    assert replicas_of(replace(given, sample=waiting)) == 3


def test_grows_for_a_latency_over_its_slo_and_remembers_the_trial():
    seen = sample(10, 10, inter_token_latency_p90=1.5)
    verdict, memory = decide(situation(10, 10, spec=spec(slo=slo(itl="1s")), sample=seen), KNOWN)
    assert (verdict.replicas, verdict.reason) == (3, ScalingReason.INTER_TOKEN_LATENCY)
    assert memory.trial == Trial(ScalingReason.INTER_TOKEN_LATENCY, 1.5, NOW)


def test_latencies_do_not_count_while_replicas_start_or_are_cold():
    seen = sample(10, 10, inter_token_latency_p90=1.5)
    given = situation(10, 10, spec=spec(slo=slo(itl="1s")), sample=seen)
    assert replicas_of(replace(given, current=3)) == 3
    assert replicas_of(replace(given, ready={"pod-0": 1000.0, "pod-1": COLD_SECONDS - 1})) == 2
    assert replicas_of(replace(given, ready={"pod-0": 1000.0, "pod-1": COLD_SECONDS})) == 3


@pytest.mark.parametrize(("ready_seconds", "expected"), [(119, 2), (120, 3)])
def test_nor_do_they_while_their_window_reaches_back_to_a_start(ready_seconds: float, expected: int) -> None:
    seen = sample(10, 10, inter_token_latency_p90=1.5, window_seconds=120.0)
    ready = {"pod-0": 1000.0, "pod-1": ready_seconds}
    assert replicas_of(situation(10, 10, spec=spec(slo=slo(itl="1s")), sample=seen, ready=ready)) == expected


def test_an_slo_that_cannot_be_met_neither_grows_nor_keeps_from_shrinking():
    seen = sample(10, 10, 10, 10, inter_token_latency_p90=1.5)
    given = situation(10, 10, 10, 10, spec=replace(SHRINKING, slo=slo(itl="1s")), sample=seen)
    tried = replace(KNOWN, trial=Trial(ScalingReason.INTER_TOKEN_LATENCY, 1.5, NOW))
    verdict, memory = decide(given, tried)
    assert verdict.replicas == 2
    assert memory.trial is not None
    assert memory.trial.in_vain_since == NOW


WAITED_FOR = (load("pod-0", 10, uncached_tokens=15), load("pod-1", 10, uncached_tokens=15))
"""Too little for a queue, as much as a p90 that is none of long prompts alone."""


@pytest.mark.parametrize(
    ("role", "latency", "is_guarded"),
    [
        ("serve", "time_to_first_token_p90", True),
        ("serve", "inter_token_latency_p90", True),
        ("prefill", "time_to_first_token_p90", True),
        ("prefill", "inter_token_latency_p90", False),
        ("decode", "time_to_first_token_p90", False),
        ("decode", "inter_token_latency_p90", True),
    ],
)
def test_each_role_answers_for_its_own_latency(role, latency, is_guarded):
    seen = sample(replicas=WAITED_FOR, uncached_tokens_per_second=40.0, **{latency: 1.5})
    given = situation(10, 10, role=role, spec=spec(slo=slo("1s", "1s")), sample=seen)
    assert replicas_of(given) == (3 if is_guarded else 2)


def test_decode_does_not_size_itself_by_the_time_to_the_first_token():
    seen = sample(10, uncached_tokens_per_second=75, mean_uncached_tokens=50)
    given = situation(10, sample=seen, spec=spec(slo=slo("1s")))
    assert replicas_of(given) > 1
    assert replicas_of(replace(given, role="decode")) == 1


@pytest.mark.parametrize(("needed", "expected"), [(0, 1), (99, 3)])
def test_stays_within_bounds(needed, expected):
    given = situation(needed * 500, 0, spec=replace(SHRINKING, min_replicas=1, max_replicas=3))
    assert replicas_of(given) == expected


def test_a_forecast_raises_and_never_lowers():
    ramp = tuple(PastNeed(NOW - ago, 2 - ago / 150) for ago in (150, 120, 90, 60, 30))
    given = situation(500, 500)
    verdict, _ = decide(given, replace(KNOWN, needs=ramp))
    assert (verdict.replicas, verdict.reason) == (3, ScalingReason.FORECAST)
    fall = tuple(PastNeed(NOW - ago, 2 + ago / 150) for ago in (150, 120, 90, 60, 30))
    assert replicas_of(given, replace(KNOWN, needs=fall)) == 2
    assert replicas_of(replace(given, former_days=(5.0, 5.0))) == 4
    assert replicas_of(replace(given, former_days=(0.0, 0.0))) == 2


def test_needs_are_remembered_for_the_trend_and_no_longer():
    _, memory = decide(situation(500), replace(KNOWN, needs=(PastNeed(NOW - 600, 9), PastNeed(NOW - 599, 1))))
    assert memory.needs == (PastNeed(NOW - 599, 1), PastNeed(NOW, 1.0))


def test_during_a_rollout_replicas_grow_and_do_not_shrink():
    assert replicas_of(situation(900, is_rolling=True), KNOWN) == 2
    given, memory = situation(*[50] * 8, startup_seconds=0.0), replace(KNOWN, recommendations=(Recommendation(NOW, 1),))
    assert decide(given, memory)[0].replicas < 8
    verdict, after = decide(replace(given, is_rolling=True), memory)
    assert (verdict.replicas, verdict.held) == (8, HoldReason.ROLLOUT)
    assert after.changes == ()


def test_a_role_is_not_idle_before_a_replica_of_it_was_ready():
    given = situation(0)
    memory = noting_idleness(replace(given, ready={}, is_beginning=True), KNOWN)
    assert memory.idle_since is None
    assert noting_idleness(replace(given, is_rolling=True), replace(KNOWN, idle_since=NOW - 60)).idle_since is None
    assert noting_idleness(given, memory).idle_since == NOW


def test_prometheus_that_does_not_answer_holds_the_last_value_and_says_why():
    verdict, memory = decide(situation(900, sample=None, trouble="connection refused"), KNOWN)
    assert (verdict.replicas, verdict.held) == (1, HoldReason.METRICS_UNAVAILABLE)
    assert verdict.message == "connection refused"
    assert memory == KNOWN


@pytest.mark.parametrize(("age", "held"), [(STALE_SECONDS, None), (STALE_SECONDS + 1, HoldReason.METRICS_STALE)])
def test_a_stale_sample_holds(age, held):
    verdict, _ = decide(situation(900, sample=sample(900, at=NOW - age)), KNOWN)
    assert (verdict.held, verdict.replicas) == (held, 1 if held else 2)


def test_a_warm_replica_without_series_holds_and_a_cold_one_does_not():
    given = situation(900, 900, sample=sample(900))
    verdict, _ = decide(given, KNOWN)
    assert (verdict.held, verdict.message) == (HoldReason.METRICS_MISSING, "Prometheus has no series of pod-1")
    cold = replace(given, ready={"pod-0": 1000.0, "pod-1": COLD_SECONDS - 1})
    assert decide(cold, KNOWN)[0].held is None


@pytest.mark.parametrize(("seconds", "held"), [(COLD_SECONDS - 1, None), (COLD_SECONDS, HoldReason.METRICS_MISSING)])
def test_a_warm_router_without_series_holds_though_another_has_some(seconds: float, held: HoldReason | None) -> None:
    seen = sample(900, routers=frozenset({"router-0"}))
    given = situation(900, sample=seen, routers={"router-0": 1000.0, "router-1": seconds})
    verdict, _ = decide(given, KNOWN)
    assert (verdict.held, verdict.replicas) == (held, 1 if held else 2)
    if held:
        assert verdict.message == "Prometheus has no series of router-1"


@pytest.mark.parametrize(
    ("current", "is_beginning", "held"),
    [(1, False, HoldReason.METRICS_MISSING), (1, True, HoldReason.NOTHING_MEASURED), (0, False, None)],
)
def test_a_sample_that_lacks_a_series_holds_and_at_zero_what_is_known_wakes(
    current: int, is_beginning: bool, held: HoldReason | None
) -> None:
    seen = sample(900, num_held=1, lacking=("held_tokens of router-0",))
    given = situation(900, current=current, is_beginning=is_beginning, sample=seen, spec=SLEEPY)
    verdict, _ = decide(given, KNOWN)
    assert verdict.held is held
    if held:
        assert verdict.message == "Prometheus has no series of held_tokens of router-0"
    else:
        assert verdict.replicas > 0


def test_on_the_way_to_zero_no_series_is_missed():
    verdict, _ = decide(situation(900, current=0, sample=sample(), spec=spec(least=0)), KNOWN)
    assert (verdict.held, verdict.replicas) == (None, 0)


def test_series_of_a_removed_pod_do_not_count():
    assert replicas_of(situation(400, sample=sample(400, 900))) == 1


def test_rates_of_a_cold_replica_are_left_out():
    replicas = (load("pod-0"), load("pod-1", prefill_tokens_per_second=1), load("pod-2", prefill_tokens_per_second=1))
    ready = {"pod-0": 1000.0, "pod-1": 1.0, "pod-2": 1.0}
    seen = sample(replicas=replicas, uncached_tokens_per_second=100)
    assert replicas_of(situation(0, 0, 0, ready=ready, sample=seen)) == 3


def test_before_any_replica_has_told_its_capacity_nothing_is_decided():
    verdict, _ = decide(situation(current=2, sample=sample(num_held=9, held_tokens=9e9)), Memory())
    assert (verdict.replicas, verdict.held) == (2, HoldReason.NOTHING_MEASURED)


@pytest.mark.parametrize(
    ("current", "least", "most", "expected"), [(2, 3, 9, 3), (5, 1, 4, 4), (0, 0, 4, 0), (0, 1, 4, 1)]
)
def test_bounds_hold_while_nothing_is_known(current, least, most, expected):
    given = situation(current=current, sample=None, spec=spec(least, most))
    verdict, _ = decide(given, Memory())
    assert verdict.replicas == expected
    assert (verdict.reason is ScalingReason.BOUNDS) is (current != expected)


SLEEPY = spec(0, 4, scale_to_zero_after=Duration("60s"))


def test_the_last_replica_goes_only_when_the_service_is_idle():
    given = situation(0, spec=replace(SLEEPY, behavior=AT_ONCE))
    assert decide(given, KNOWN, is_service_idle=False)[0].replicas == 1
    verdict, _ = decide(given, KNOWN, is_service_idle=True)
    assert (verdict.replicas, verdict.reason) == (0, ScalingReason.IDLE)
    assert decide(replace(given, spec=spec(1)), KNOWN, is_service_idle=True)[0].replicas == 1


@pytest.mark.parametrize(
    ("work", "is_idle"),
    [
        ({}, True),
        ({"num_held": 1}, False),
        ({"uncached_tokens_per_second": 0.1}, False),
        ({"requests_per_second": 0.1}, False),
        ({"replicas": (load("pod-0", num_running=1),)}, False),
        ({"replicas": (load("pod-0", num_waiting=1),)}, False),
        ({"at": NOW - STALE_SECONDS - 1}, False),
    ],
)
def test_idle_time_begins_anew_with_any_work_and_with_any_doubt(work, is_idle):
    given = situation(0, sample=sample(0, **work))
    memory = noting_idleness(given, replace(KNOWN, idle_since=NOW - 60))
    assert idle_seconds(given, memory) == (60 if is_idle else 0)


def test_idle_time_begins_when_it_is_first_seen():
    assert noting_idleness(situation(0), KNOWN).idle_since == NOW


@pytest.mark.parametrize(("num_held", "expected"), [(0, 0), (1, 1)])
def test_the_first_held_request_wakes(num_held, expected):
    given = situation(spec=SLEEPY, sample=sample(num_held=num_held, held_tokens=num_held))
    assert replicas_of(given, Memory()) == expected


def test_many_held_requests_wake_as_many_as_they_need_by_what_is_remembered_of_a_replica():
    given = situation(spec=SLEEPY, sample=sample(num_held=9, held_tokens=1100))
    assert replicas_of(given) == 3
    assert replicas_of(replace(given, sample=sample(num_held=9, held_tokens=1e9))) == 4


def test_what_wakes_is_not_taken_to_go_on_arriving() -> None:
    roomy = replace(KNOWN, capacity=Capacity(1e9, 100))
    given = situation(spec=SLEEPY, sample=sample(num_held=9, held_tokens=10_000))
    growing = (Backlog(NOW - 30, 0), Backlog(NOW - 15, 5000))
    assert replicas_of(given, replace(roomy, backlogs=growing)) == replicas_of(given, roomy) == 1


def test_roles_wake_together_even_where_one_has_no_metrics():
    prefill = situation(role="prefill", spec=SLEEPY, sample=sample(num_held=1))
    decode = situation(role="decode", spec=replace(SLEEPY, min_replicas=0), sample=None, trouble="no answer")
    decided = decide_together({"prefill": prefill, "decode": decode}, {})
    assert [verdict.replicas for verdict, _ in decided.values()] == [1, 1]
    assert decided["decode"][1].changes == (Change(NOW, 1),)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ({}, 0),
        ({"replicas": (load("pod-0", num_running=1),)}, 1),
        ({"requests_per_second": 0.1}, 1),
        ({"replicas": (load("gone", num_running=1), load("pod-0"))}, 0),
        ({"replicas": (load("pod-0", num_running=1),), "at": NOW - STALE_SECONDS - 1}, 0),
    ],
    ids=["idle", "runs", "has answered", "of a pod that is gone", "stale"],
)
def test_a_role_at_zero_wakes_when_another_has_work_though_nothing_is_held(work, expected) -> None:
    prefill = situation(role="prefill", spec=SLEEPY, sample=sample())
    decode = situation(0, role="decode", spec=spec(1), sample=sample(0, **work))
    woken, memory = decide_together({"prefill": prefill, "decode": decode}, {"decode": KNOWN})["prefill"]
    assert woken.replicas == expected
    if expected:
        assert (woken.reason, woken.message) == (ScalingReason.OTHER_ROLE_BUSY, "decode has work")
        assert memory.changes == (Change(NOW, 1),)


@pytest.mark.parametrize(("decode_idle", "expected"), [(60, [0, 0]), (59, [1, 1])])
def test_roles_go_to_zero_together(decode_idle, expected):
    roles = {role: situation(0, role=role, spec=SLEEPY) for role in ("prefill", "decode")}
    memories = {
        "prefill": replace(KNOWN, idle_since=NOW - 1000),
        "decode": replace(KNOWN, idle_since=NOW - decode_idle),
    }
    assert [verdict.replicas for verdict, _ in decide_together(roles, memories).values()] == expected


def test_replicas_of_which_none_serves_yet_are_let_go_where_nothing_is_left_to_do() -> None:
    assert replicas_of(situation(current=3, spec=SHRINKING)) == 1


@pytest.mark.parametrize(("itl", "most"), [(1.5, 4), (1.05, 100)])
def test_an_slo_missed_at_the_most_replicas_or_by_little_keeps_them_for_a_quarter_of_an_hour_and_no_longer(
    itl: float, most: int
) -> None:
    seen = sample(10, 10, 10, 10, inter_token_latency_p90=itl)
    limits = replace(SHRINKING, slo=slo(itl="1s"), max_replicas=most)
    given = situation(10, 10, 10, 10, spec=limits, sample=seen)
    verdict, memory = decide(given, KNOWN)
    assert verdict.replicas == 4
    for later, expected in ((GIVE_UP_SECONDS - 1, 4), (GIVE_UP_SECONDS, 2)):
        at = NOW + later
        verdict, memory = decide(replace(given, now=at, sample=replace(seen, at=at)), memory)
        assert verdict.replicas == expected


def test_what_is_needed_is_told_without_forecast_so_that_no_day_rests_on_the_forecast_of_another() -> None:
    verdict, _ = decide(situation(500, 500, former_days=(5.0, 5.0)), KNOWN)
    assert (verdict.replicas, verdict.reason, verdict.needed) == (4, ScalingReason.FORECAST, 2.0)


def test_needs_of_each_minute_are_remembered_those_at_zero_too() -> None:
    _, memory = decide(situation(500, 500), KNOWN)
    assert memory.history.bins == (2.0,)
    _, memory = decide(situation(spec=SLEEPY, now=NOW + 60, sample=sample(at=NOW + 60)), memory)
    assert memory.history.bins == (2.0, 0.0)


@pytest.mark.parametrize(
    ("is_beginning", "held"), [(True, HoldReason.NOTHING_MEASURED), (False, HoldReason.METRICS_UNAVAILABLE)]
)
def test_a_service_that_has_just_begun_is_no_fault_of_prometheus(is_beginning: bool, held: HoldReason) -> None:
    verdict, _ = decide(situation(900, sample=None, trouble="no series", is_beginning=is_beginning), KNOWN)
    assert (verdict.held, verdict.is_faulty) == (held, not is_beginning)


TTFT_OVER = {"time_to_first_token_p90": 1.5, "mean_uncached_tokens": 1.0, "uncached_tokens_per_second": 40.0}


@pytest.mark.parametrize(("computed", "reason"), [(120.0, None), (0.0, ScalingReason.TIME_TO_FIRST_TOKEN)])
def test_times_to_the_first_token_of_a_queue_that_ends_by_itself_call_for_nothing(
    computed: float, reason: ScalingReason | None
) -> None:
    replicas = (load("pod-0", 10, uncached_tokens=50), load("pod-1", 10))
    seen = sample(replicas=replicas, computed_tokens_per_second=computed, **TTFT_OVER)
    verdict, memory = decide(situation(10, 10, spec=spec(slo=slo("1s")), sample=seen), KNOWN)
    assert verdict.reason is reason
    assert memory.queued_at == NOW


DRAINING = (load("pod-0", 10, uncached_tokens=50), load("pod-1", 10))


@pytest.mark.parametrize("queued_at", [None, NOW - 60], ids=["while it drains", "just after"])
def test_times_between_tokens_count_beside_a_queue_that_ends_by_itself(queued_at: float | None) -> None:
    replicas = sample(10, 10).replicas if queued_at else DRAINING
    seen = sample(replicas=replicas, computed_tokens_per_second=120.0, inter_token_latency_p90=1.5, **TTFT_OVER)
    given = situation(10, 10, spec=spec(slo=slo("1s", "1s")), sample=seen)
    verdict, memory = decide(given, replace(KNOWN, queued_at=queued_at))
    assert (verdict.replicas, verdict.reason) == (3, ScalingReason.INTER_TOKEN_LATENCY)
    assert memory.trial == Trial(ScalingReason.INTER_TOKEN_LATENCY, 1.5, NOW)


def test_a_trial_for_times_to_the_first_token_waits_for_a_queue_that_ends_by_itself() -> None:
    seen = sample(replicas=DRAINING, computed_tokens_per_second=120.0, **TTFT_OVER)
    trial = Trial(ScalingReason.TIME_TO_FIRST_TOKEN, 1.5, NOW)
    _, memory = decide(situation(10, 10, spec=spec(slo=slo("1s")), sample=seen), replace(KNOWN, trial=trial))
    assert memory.trial == trial


def test_nor_do_they_just_after_it_has_ended() -> None:
    seen = sample(replicas=WAITED_FOR, **TTFT_OVER)
    given = situation(10, 10, spec=spec(slo=slo("1s")), sample=seen)
    assert replicas_of(given, replace(KNOWN, queued_at=NOW - 61)) == 2
    assert replicas_of(given, replace(KNOWN, queued_at=NOW - 62)) == 3


@pytest.mark.parametrize(("waiting", "arriving", "replicas"), [(0.0, 0.0, 2), (39.0, 40.0, 2), (50.0, 40.0, 3)])
def test_prompts_that_are_long_and_wait_for_nobody_call_for_nothing(
    waiting: float, arriving: float, replicas: int
) -> None:
    """Beside 40 tokens a second, of a second each, 50 that are there at a time have waited."""
    seen = sample(
        replicas=(load("pod-0", 10, uncached_tokens=waiting), load("pod-1", 10)),
        uncached_tokens_per_second=arriving,
        computed_tokens_per_second=arriving,
        mean_uncached_tokens=100.0,
        time_to_first_token_p90=1.8,
    )
    given = situation(10, 10, spec=spec(slo=slo("1500ms")), sample=seen)
    assert replicas_of(given) == replicas


@pytest.mark.parametrize(("waiting", "replicas"), [(0.0, 1), (50.0, 3)])
def test_nor_do_they_keep_replicas(waiting: float, replicas: int) -> None:
    seen = sample(
        replicas=tuple(load(f"pod-{index}", 10, uncached_tokens=waiting / 3) for index in range(3)),
        uncached_tokens_per_second=10.0,
        computed_tokens_per_second=10.0,
        mean_uncached_tokens=100.0,
        time_to_first_token_p90=1.4,
    )
    given = situation(10, 10, 10, spec=replace(SHRINKING, slo=slo("1500ms")), sample=seen)
    assert replicas_of(given) == replicas


@pytest.mark.parametrize(("period", "replicas"), [(None, 4), (9, 2)])
def test_what_is_known_to_come_back_later_keeps_no_replica_until_then(period: int | None, replicas: int) -> None:
    former = tuple(Recommendation(NOW - ago, wanted) for ago, wanted in ((70, 4), (55, 1), (40, 1), (15, 1)))
    memory = replace(KNOWN, recommendations=former, history=History(NOW, (0.5,), period))
    assert replicas_of(situation(10, 10, 10, 10), memory) == replicas


def test_a_queue_that_grows_calls_for_as_many_as_it_needs_once_they_serve_and_those_on_their_way_are_among_them() -> (
    None
):
    replicas = (load("pod-0", uncached_tokens=600),)
    seen = sample(replicas=replicas, uncached_tokens_per_second=200, computed_tokens_per_second=100)
    given = situation(0, sample=seen, startup_seconds=60.0, spec=replace(SHRINKING, target_kv_cache_usage=1.0))
    # In 60 s 6600 tokens wait, worked off in 60 s more beside 200 a second.
    assert replicas_of(given) == 2
    assert decide(given, KNOWN)[0].needed == pytest.approx((200 + 6600 / 60) / 100)
    on_its_way = replace(KNOWN, changes=(Change(NOW - 30, 1),))
    assert decide(replace(given, current=2), on_its_way)[0].needed == pytest.approx(
        (200 + (6600 - 30 * 100) / 60) / 100
    )


def test_tolerance_is_around_what_was_recommended_where_policies_have_not_let_it_through_yet() -> None:
    memory = replace(KNOWN, recommendations=(Recommendation(NOW - 15, 5),), changes=(Change(NOW - 15, 2),))
    assert decide(situation(1050, 1050, current=4), memory)[1].recommendations[-1].replicas == 5
    assert decide(situation(1050, 1050, current=4), KNOWN)[1].recommendations[-1].replicas == 4


@pytest.mark.parametrize(("ttft", "expected"), [("1s", 3), (None, 2)])
def test_what_keeps_prompts_within_the_slo_leaves_no_tenth_to_spare(ttft: str | None, expected: int) -> None:
    seen = sample(10, 10, uncached_tokens_per_second=168, mean_uncached_tokens=10)
    verdict, _ = decide(situation(10, 10, sample=seen, spec=spec(slo=slo(ttft))), KNOWN)
    assert verdict.needed == pytest.approx(2.11, abs=0.02)
    assert verdict.replicas == expected


@pytest.mark.parametrize(
    ("before", "needed"),
    [
        ((Backlog(NOW - 30, 0), Backlog(NOW - 15, 300)), (120 + (600 + 20 * 60) / 60) / 100),
        ((Backlog(NOW - 30, 0), Backlog(NOW - 15, 0)), 1.25),  # for what arrives, over four fifths of the rate
        ((), 1.25),
    ],
)
def test_a_queue_that_goes_on_growing_calls_for_more_before_the_rate_does(
    before: tuple[Backlog, ...], needed: float
) -> None:
    seen = sample(0, held_tokens=600, uncached_tokens_per_second=100, computed_tokens_per_second=100)
    verdict, memory = decide(situation(0, sample=seen, startup_seconds=60.0), replace(KNOWN, backlogs=before))
    assert memory.backlogs == (*before, Backlog(NOW, 600, {"pod-0": 0}))
    assert verdict.needed == pytest.approx(needed)


def test_a_batch_that_came_at_once_is_not_taken_to_go_on() -> None:
    """Beyond the rate of the minute that it came in: 30,000 tokens in half a minute are 1000 a second."""
    seen = sample(
        replicas=(load("pod-0", kv_capacity_tokens=1e9),),
        held_tokens=30_000,
        uncached_tokens_per_second=500,
        computed_tokens_per_second=100,
    )
    memory = replace(KNOWN, backlogs=(Backlog(NOW - 30, 0), Backlog(NOW - 15, 0)))
    verdict, _ = decide(situation(0, sample=seen, startup_seconds=120.0), memory)
    assert verdict.needed == pytest.approx((500 + (30_000 + 500 * 120 - 100 * 120) / 120) / 100) == 11.5


@pytest.mark.parametrize("num_before", [1, 2])
def test_a_queue_has_not_grown_by_what_a_replica_has_that_is_seen_later(num_before: int) -> None:
    both = tuple(load(name, uncached_tokens=6000, kv_capacity_tokens=1e9) for name in ("pod-0", "pod-1"))
    rates = {"uncached_tokens_per_second": 200, "computed_tokens_per_second": 200}
    given = situation(0, 0, ready={"pod-0": 1000.0, "pod-1": COLD_SECONDS - 1}, startup_seconds=60.0)
    memory = KNOWN
    for ago, num_seen, held in ((30, num_before, 0), (15, num_before, 300), (0, 2, 600)):
        seen = sample(replicas=both[:num_seen], at=NOW - ago, held_tokens=held, **rates)
        verdict, memory = decide(replace(given, now=NOW - ago, sample=seen), memory)
    assert verdict.needed == pytest.approx((220 + (12_600 + (220 - 200) * 60) / 60) / 100)
