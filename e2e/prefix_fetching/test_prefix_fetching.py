"""Verdict by traffic: a prefill pod is killed, and fetches from others what it had cached."""

import signal
import time

import pytest
from e2e.conftest import StartLoad
from e2e.engine_processes import signalling
from e2e.engines import engine_of, is_whole_without
from e2e.live_cluster import POLL_SECONDS, LiveService, is_pod_ready
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from e2e.watch import watching
from tests.controlplane.processes import wait_until

NUM_ENGINES, NUM_CLIENTS = 4, 8
NUM_GIVEN, NUM_TOKENS = 800, 100
WHOLE_WITHIN_SECONDS = 180.0
SILENCE_LIMIT_SECONDS = 15.0
FETCHES = "kvasir_router_prefix_fetches_total"
RECEIVED = 'kvasir_kv_transfer_bytes_total{.*direction="received".*}'

pytestmark = pytest.mark.timeout(600)


@pytest.mark.usefixtures("rig")
def test_a_prefill_pod_that_lost_its_cache_fetches_what_others_have(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    expected = answers(NUM_TOKENS, num_given=NUM_GIVEN)
    load = start_load(own_service, expected, num_clients=NUM_CLIENTS)
    with load as clients, watching(own_service.cluster, "pods", own_service.namespace) as pods:
        clients.wait_streams(NUM_CLIENTS)
        victim = next(engine_of(pod) for pod in own_service.pods("prefill") if is_pod_ready(pod))
        struck = time.time()
        signalling(signal.SIGKILL)(victim)
        what = f"{NUM_ENGINES} ready engines of {own_service.name} without {victim.pod} as it was"
        whole = pods.first(is_whole_without(victim, NUM_ENGINES), WHOLE_WITHIN_SECONDS, what, after=struck)
        wait_until(lambda: fetched(own_service) > 0, 60, "a prefix that a prefill pod fetches", POLL_SECONDS)
        clients.wait_streams(NUM_CLIENTS)
        verdict = clients.stop()
    fetches = sum(own_service.metric(pod, FETCHES) for pod in own_service.pods("router"))
    note = f"{fetches:.0f} fetches, {fetched(own_service) / 2**20:.1f} MiB received by prefill pods"
    verdicts.add("prefix fetching: SIGKILL of prefill", verdict, note, whole_again=whole - struck)
    assert not verdict.failures, verdict
    assert fetches > 0
    assert verdict.longest_gap_seconds < SILENCE_LIMIT_SECONDS


def fetched(service: LiveService) -> float:
    """Bytes that prefill pods received, which otherwise only send."""
    return sum(service.metric(pod, RECEIVED) for pod in service.pods("prefill"))
