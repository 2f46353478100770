"""Verdict by traffic: the router hears nothing more of the API server while engines change."""

import time

import pytest
from e2e.cluster.rig.faults import connections_silenced
from e2e.conftest import StartLoad
from e2e.engines import busy_engine
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveService, is_pod_ready, uid_of
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from tests.controlplane.processes import wait_until

API_PORT = 443
"""Of the Service `kubernetes`, through which pods reach it."""
HEARD_WITHIN_SECONDS = 100.0
ANSWERED = "kvasir_e2e_request_latency_seconds_count"
NUM_CLIENTS, NUM_TOKENS = 6, 300


@pytest.mark.usefixtures("rig")
def test_no_stream_fails_and_the_router_asks_anew(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    [router] = own_service.pods("router")
    before = own_service.staying_uids("serve")
    with start_load(own_service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load:
        with connections_silenced(uid_of(router), "router", API_PORT):
            silent_since = time.time()
            own_service.tell_to_go(busy_engine(own_service).pod)
            new = wait_until(lambda: ready_but(own_service, before), 60, "another engine", POLL_SECONDS)
            assert own_service.metric(new, ANSWERED) == 0, "the router has heard of it: its watch is not silent"
            what = "the new engine to answer"
            wait_until(lambda: own_service.metric(new, ANSWERED) > 0, HEARD_WITHIN_SECONDS, what, POLL_SECONDS)
            heard_after = time.time() - silent_since
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    verdicts.add("silent watch", verdict, new_engine_answers=heard_after)
    assert not verdict.failures, verdict
    assert heard_after < HEARD_WITHIN_SECONDS
    assert uid_of(own_service.pods("router")[0]) == uid_of(router)


def ready_but(service: LiveService, others: set[str]) -> KubeObject | None:
    return next((pod for pod in service.pods("serve") if is_pod_ready(pod) and uid_of(pod) not in others), None)
