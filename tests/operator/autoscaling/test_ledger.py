"""What passes read of the autoscaler."""

from typing import Any

from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.ledger import ServiceScaling, entry_of, merged_entries, replicas_by_role
from kvasir_operator.autoscaling.situation import HoldReason, Verdict


def entries(*times: int) -> list[dict[str, Any]]:
    return [{"time": str(time)} for time in times]


def test_the_last_ten_decisions_stay_and_none_twice() -> None:
    assert merged_entries(entries(1, 2), entries(2, 3)) == entries(1, 2, 3)
    assert merged_entries(entries(*range(10)), entries(10)) == entries(*range(1, 11))


def test_a_new_leader_goes_on_from_the_status_until_it_has_decided() -> None:
    service = {"status": {"roles": [{"role": "prefill", "desired": 3}, {"role": "decode", "desired": 2}]}}
    assert replicas_by_role(ServiceScaling(), service) == {"prefill": 3, "decode": 2}
    decided = ServiceScaling({"decode": Verdict(5, ScalingReason.KV_CACHE_DEMAND, "")})
    assert replicas_by_role(decided, service) == {"prefill": 3, "decode": 5}


def test_only_faults_are_trouble() -> None:
    rolling = Verdict(2, None, "a rollout is in progress", held=HoldReason.ROLLOUT)
    stale = Verdict(2, None, "too old", held=HoldReason.METRICS_STALE)
    assert ServiceScaling({"prefill": rolling}).trouble is None
    trouble = ServiceScaling({"prefill": rolling, "decode": stale}).trouble
    assert trouble is not None
    assert (trouble.reason, trouble.message) == ("MetricsStale", "decode stays at 2: too old")


def test_an_entry_says_from_what_to_what_and_why() -> None:
    verdict = Verdict(2, ScalingReason.KV_CACHE_DEMAND, "demand")
    expected = {"time": "t", "role": "serve", "from": 1, "to": 2, "reason": "KVCacheDemand", "message": "demand"}
    assert entry_of("serve", 1, verdict, "t") == expected
