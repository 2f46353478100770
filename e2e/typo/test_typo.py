"""Verdict by status and by traffic: one object that the API server cannot read holds up nothing else."""

import time

import pytest
from e2e.conftest import StartLoad
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveService, uid_of
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from tests.controlplane.processes import wait_until

NUM_CLIENTS, NUM_TOKENS = 6, 200
TELLS_WITHIN_SECONDS, REPAIRED_WITHIN_SECONDS = 30.0, 60.0
CHILD = "typed-engine"
TYPOS: dict[str, KubeObject] = {"affinity": {"nodeAffinty": {}}, "securityContext": {"fsGroup2": 5}}


@pytest.mark.parametrize("field", TYPOS)
def test_a_typo_is_named_and_the_service_serves_on(
    field: str, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    before, [typo] = own_service.staying_uids("serve", "router"), TYPOS[field]
    with start_load(own_service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load:
        changed = time.monotonic()
        own_service.patch({"pod": {field: TYPOS[field]}})
        own_service.wait_condition("Degraded", lambda found: names(found, typo), TELLS_WITHIN_SECONDS)
        named = time.monotonic() - changed
        assert own_service.condition("Ready")["status"] == "True"
        repaired = repair(own_service)
        load.wait_streams(NUM_CLIENTS)
        own_service.patch({"pod": {field: None}})
        own_service.wait_ready()
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    verdicts.add(f"typo in {field}", verdict, named=named, child_made_again=repaired)
    assert not verdict.failures, verdict
    assert own_service.staying_uids("serve", "router") == before
    assert own_service.condition("Degraded")["status"] == "False"


def names(degraded: KubeObject, typo: str) -> bool:
    return degraded.get("status") == "True" and typo in degraded["message"]


def repair(service: LiveService) -> float:
    """Seconds until a child that was deleted by hand is there again."""
    old = service.cluster.get("networkpolicy", CHILD, service.namespace)
    assert old is not None
    service.cluster.kubectl("delete", "networkpolicy", CHILD, f"--namespace={service.namespace}")
    deleted = time.monotonic()

    def is_made_again() -> bool:
        found = service.cluster.get("networkpolicy", CHILD, service.namespace)
        return found is not None and uid_of(found) != uid_of(old)

    wait_until(is_made_again, REPAIRED_WITHIN_SECONDS, f"NetworkPolicy {CHILD} to be made again", POLL_SECONDS)
    return time.monotonic() - deleted
