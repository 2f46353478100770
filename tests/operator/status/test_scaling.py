"""What a status, its conditions and its events say of autoscaling."""

from dataclasses import replace
from typing import Any

from tests.operator.cluster_objects import deployment, pod
from tests.operator.status.service_under_test import SETTLED, condition, find, status_of

from kvasir_operator.apply.plan import Plan
from kvasir_operator.autoscaling.ledger import ServiceScaling
from kvasir_operator.autoscaling.situation import HoldReason, Verdict
from kvasir_operator.status.events import ServiceEvent, notable_changes

ENTRY = {"time": "t", "role": "serve", "from": 1, "to": 2, "reason": "KVCacheDemand", "message": "demand"}
HELD = Verdict(2, None, "no answer", held=HoldReason.METRICS_UNAVAILABLE)


def status(scaling: ServiceScaling | None, previous: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    situation = replace(SETTLED, scaling=scaling, **changes)
    return status_of([deployment()], [pod("a"), pod("b"), pod("r", "router")], situation, previous)


def types(status: dict[str, Any]) -> list[str]:
    return [each["type"] for each in status["conditions"]]


def events(previous: dict[str, Any], now: dict[str, Any]) -> list[ServiceEvent]:
    return notable_changes(previous, now, Plan())


def test_a_service_that_is_not_scaled_says_nothing_of_it() -> None:
    assert "ScalingActive" not in types(status(None))
    assert "scaling" not in status(None)
    assert "ScalingActive" not in types(status(ServiceScaling(), is_suspended=True))


def test_replicas_that_follow_demand_are_said_to() -> None:
    assert condition(status(ServiceScaling()), "ScalingActive") == ("True", "FollowingDemand")


def test_replicas_that_stay_for_want_of_metrics_are_a_condition_and_one_event() -> None:
    before, after = status(ServiceScaling()), status(ServiceScaling({"serve": HELD}))
    assert condition(after, "ScalingActive") == ("False", "MetricsUnavailable")
    assert find(after, "ScalingActive")["message"] == "serve stays at 2: no answer"
    assert events(before, after) == [ServiceEvent("Warning", "MetricsUnavailable", "serve stays at 2: no answer")]
    assert events(after, after) == []


def test_a_service_whose_replicas_stay_is_as_ready_as_it_was() -> None:
    after = status(ServiceScaling({"serve": HELD}))
    assert condition(after, "Ready") == ("True", "Serving")
    assert condition(after, "Degraded") == ("False", "AsExpected")


def test_a_decision_is_in_the_status_and_one_event() -> None:
    before, after = status(ServiceScaling()), status(ServiceScaling(entries=(ENTRY,)))
    assert after["scaling"] == [ENTRY]
    assert events(before, after) == [ServiceEvent("Normal", "KVCacheDemand", "serve: from 1 to 2: demand")]
    assert events(after, status(ServiceScaling(entries=(ENTRY,)), previous=after)) == []


def test_decisions_of_a_former_leader_stay() -> None:
    former = status(ServiceScaling(entries=(ENTRY,)))
    assert status(ServiceScaling(), previous=former)["scaling"] == [ENTRY]
