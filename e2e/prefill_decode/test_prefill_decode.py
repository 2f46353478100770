"""Verdict by traffic: pods of either role are killed, stopped and drained, and both roles get a new revision."""

import os
import signal
import time
from collections.abc import Callable

import pytest
from e2e.conftest import StartLoad
from e2e.engine_processes import all_processes
from e2e.engines import Engine, busy_engine, engine_of, is_whole_without, num_resumed
from e2e.live_cluster import LiveService, is_pod_ready
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from e2e.watch import watching

NUM_ENGINES, NUM_CLIENTS, NUM_TOKENS = 4, 8, 600
WHOLE_WITHIN_SECONDS = 180.0
SILENCE_LIMIT_SECONDS = 15.0
SENT = "kvasir_kv_transfer_blocks_total"
# Of each prompt: blocks to transfer, and more than remotePrefillMinTokens.
NUM_GIVEN = 400
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])

pytestmark = pytest.mark.timeout(600)


def test_prompts_are_computed_by_prefill_pods(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    with start_load(own_service, answers(100, num_given=NUM_GIVEN), num_clients=NUM_CLIENTS) as load:
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    sent = sum(own_service.metric(pod, SENT) for pod in own_service.pods("prefill"))
    verdicts.add("prefill and decode", verdict, f"{sent:.0f} blocks sent")
    assert not verdict.failures, verdict
    assert sent > 0


@ROLES
@pytest.mark.usefixtures("rig")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_outlive_a_pod(
    role: str, number: signal.Signals, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    def strike(victim: Engine) -> None:
        for pid in all_processes(victim):
            os.kill(pid, number)

    strike_a_pod(f"prefill and decode: {number.name} of {role}", role, strike, own_service, start_load, verdicts)


@ROLES
def test_streams_outlive_a_pod_that_is_told_to_go(
    role: str, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    def delete(victim: Engine) -> None:
        own_service.cluster.kubectl("delete", "pod", victim.pod, f"--namespace={own_service.namespace}", "--wait=false")

    strike_a_pod(f"prefill and decode: {role} drained", role, delete, own_service, start_load, verdicts)


def test_without_prefill_pods_decode_pods_compute_the_prompts(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    def is_missed(condition: dict[str, str]) -> bool | None:
        return (condition.get("status"), condition.get("reason")) == ("True", "NoReadyPrefill") or None

    with start_load(own_service, answers(200, num_given=NUM_GIVEN), num_clients=4) as load:
        selector = f"--selector=serving.kvasir.dev/service={own_service.name},serving.kvasir.dev/role=prefill"
        struck = time.time()
        own_service.cluster.kubectl(
            "delete", "pods", f"--namespace={own_service.namespace}", selector, "--force", "--grace-period=0"
        )
        own_service.wait_condition("Degraded", is_missed, 30)
        told_after = time.time() - struck
        assert own_service.condition("Ready")["status"] == "True"
        own_service.wait_ready()
        verdict = load.stop()
    verdicts.add("prefill and decode: no prefill pod", verdict, status_says_so=told_after)
    assert not verdict.failures, verdict


def test_an_update_replaces_both_roles(own_service: LiveService, start_load: StartLoad, verdicts: Verdicts) -> None:
    old = own_service.staying_uids("prefill", "decode")
    with (
        start_load(own_service, answers(NUM_TOKENS, num_given=NUM_GIVEN), num_clients=NUM_CLIENTS) as load,
        watching(own_service.cluster, "pods", own_service.namespace) as pods,
    ):
        changed_at = time.time()
        own_service.patch({"engine": {"maxNumSeqs": 24}})
        gone_at = pods.first(
            lambda state: not old & state.keys(), WHOLE_WITHIN_SECONDS, "the old pods to go", after=changed_at
        )
        own_service.wait_ready()
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    verdicts.add("prefill and decode: rolling update", verdict, update=gone_at - changed_at)
    assert not verdict.failures, verdict


def strike_a_pod(
    scenario: str,
    role: str,
    strike: Callable[[Engine], None],
    service: LiveService,
    start_load: StartLoad,
    verdicts: Verdicts,
) -> None:
    load = start_load(service, answers(NUM_TOKENS, num_given=NUM_GIVEN), num_clients=NUM_CLIENTS)
    with load as clients, watching(service.cluster, "pods", service.namespace) as pods:
        resumed_before = num_resumed(service)
        victim = victim_of(service, role)
        struck = time.time()
        strike(victim)
        what = f"{NUM_ENGINES} ready engines of {service.name} without {victim.pod} as it was"
        whole = pods.first(is_whole_without(victim, NUM_ENGINES), WHOLE_WITHIN_SECONDS, what, after=struck)
        clients.wait_streams(NUM_CLIENTS)
        verdict, resumed = clients.stop(), num_resumed(service) - resumed_before
    verdicts.add(scenario, verdict, f"{resumed} streams resumed", whole_again=whole - struck)
    assert not verdict.failures, verdict
    assert verdict.longest_gap_seconds < SILENCE_LIMIT_SECONDS


def victim_of(service: LiveService, role: str) -> Engine:
    """A decode pod with streams; prefill pods have requests for moments only."""
    if role == "decode":
        return busy_engine(service, role=role)
    return next(engine_of(pod) for pod in service.pods(role) if is_pod_ready(pod))
