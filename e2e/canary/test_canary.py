"""Verdict by traffic: a canary gets its share, then everything; a rollback scales up the workload that was kept."""

import time

from e2e.conftest import StartLoad
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveService, is_pod_ready, name_of, revision_of, uid_of
from e2e.traffic.answers import answers
from e2e.traffic.traffic import Load
from e2e.verdicts import Verdicts
from tests.controlplane.processes import wait_until

NUM_CLIENTS, NUM_TOKENS = 6, 4
WEIGHT, NUM_MEASURED = 10, 300
LOWEST_SHARE, HIGHEST_SHARE = 0.04, 0.17
"""Of 300 requests drawn at 10 %, the share is outside of these in fewer than one of a thousand runs."""
NUM_AFTERWARDS = 50
"""Requests that all must go to one revision."""
ANSWERED = "kvasir_e2e_request_latency_seconds_count"
OLD_ENGINE, NEW_ENGINE = {"maxNumSeqs": 16}, {"maxNumSeqs": 24}


def test_a_canary_gets_its_share_until_it_is_resumed_and_a_rollback_makes_no_new_workload(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    [old] = own_service.revisions()
    old_workload = uid_of(own_service.revisions()[old])
    with start_load(own_service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load:
        own_service.patch({"engine": NEW_ENGINE, "rollout": {"canary": {"weight": WEIGHT, "pause": True}}})
        new = wait_until(lambda: ready_revision_besides(own_service, old), 120, "a canary to be ready", POLL_SECONDS)
        own_service.wait_condition("Progressing", lambda found: found.get("reason") == "RolloutPaused", 30)
        while_paused = share_of(new, own_service, load, NUM_MEASURED)
        assert LOWEST_SHARE < while_paused < HIGHEST_SHARE

        resumed = time.monotonic()
        own_service.patch({"rollout": {"canary": {"weight": WEIGHT, "pause": False}}})
        own_service.wait_ready()
        all_new = time.monotonic()
        assert share_of(new, own_service, load, NUM_AFTERWARDS) == 1.0
        assert replicas(own_service) == {old: 0, new: 2}

        rolled_back = time.monotonic()
        own_service.patch({"engine": OLD_ENGINE, "rollout": {"canary": None}})
        own_service.wait_ready()
        all_old = time.monotonic()
        assert share_of(old, own_service, load, NUM_AFTERWARDS) == 1.0
        verdict = load.stop()
    verdicts.add(
        "canary, resumed and rolled back",
        verdict,
        f"{100 * while_paused:.1f} % of requests to the canary",
        all_new=all_new - resumed,
        all_old=all_old - rolled_back,
    )
    assert not verdict.failures, verdict
    assert replicas(own_service) == {old: 2, new: 0}
    assert uid_of(own_service.revisions()[old]) == old_workload, "the old revision has a new workload"


def ready_revision_besides(service: LiveService, old: str) -> str | None:
    """The revision of ready pods other than the old one's."""
    return next(
        (revision_of(pod) for pod in service.pods("serve") if is_pod_ready(pod) and revision_of(pod) != old), None
    )


def share_of(revision: str, service: LiveService, load: Load, num_requests: int) -> float:
    """The part of the next requests that pods of a revision answered."""
    before = num_answered(service)
    load.wait_streams(num_requests, seconds=240)
    after = num_answered(service)
    gained = {pod: after[pod] - before.get(pod, 0) for pod in after}
    of_revision = {name_of(pod) for pod in service.pods("serve") if revision_of(pod) == revision}
    return sum(gained[pod] for pod in gained.keys() & of_revision) / sum(gained.values())


def num_answered(service: LiveService) -> dict[str, float]:
    """Requests so far by pod, of those that are ready."""
    return {name_of(pod): service.metric(pod, ANSWERED) for pod in service.pods("serve") if is_pod_ready(pod)}


def replicas(service: LiveService) -> dict[str, int]:
    """Wanted by revision."""

    def wanted(workload: KubeObject) -> int:
        return int(workload["spec"]["replicas"])

    return {revision: wanted(workload) for revision, workload in service.revisions().items()}
