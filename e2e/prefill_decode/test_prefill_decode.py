"""Verdict by traffic: pods of either role are killed, stopped and drained; the roles get a new revision, and shrink."""

import signal
import time
from collections.abc import Callable

import pytest
from e2e.conftest import StartLoad
from e2e.engine_processes import signalling
from e2e.engines import Engine, busy_engine, engine_of, is_whole_without, num_resumed, ready_engines, telling_to_go
from e2e.live_cluster import POLL_SECONDS, LiveService, is_pod_ready, name_of
from e2e.traffic.answers import answers
from e2e.uncached_prompts import NUM_GIVEN, prompts_to_compute
from e2e.verdicts import Verdicts
from e2e.watch import watching
from tests.controlplane.processes import wait_until

NUM_ENGINES, NUM_CLIENTS = 4, 8
NUM_TOKENS = {"prefill": 200, "decode": 600}
"""Of a stream while a pod of the role is struck: prompts follow each other soon, or streams outlast the strike."""
WHOLE_WITHIN_SECONDS = 180.0
SILENCE_LIMIT_SECONDS = 15.0
BLOCKS = "kvasir_kv_transfer_blocks_total"
RECEIVED = 'kvasir_kv_transfer_bytes_total{.*direction="received".*}'
MOVED = 'kvasir_router_streams_resumed_total{.*reason="moved".*}'
REFUSED = 'kvasir_kv_transfer_failures_total{.*reason="handshake".*}'
BLOCK_TOKENS = 16
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])

pytestmark = pytest.mark.timeout(600)


def test_prompts_are_computed_by_prefill_pods(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    with prompts_to_compute(own_service, start_load, NUM_TOKENS["prefill"]) as load:
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    sent = sum(own_service.metric(pod, BLOCKS) for pod in own_service.pods("prefill"))
    received = sum(own_service.metric(pod, BLOCKS) for pod in own_service.pods("decode"))
    verdicts.add("prefill and decode", verdict, f"{sent:.0f} blocks sent, {received:.0f} received")
    assert not verdict.failures, verdict
    in_all = len(verdict.outcomes) * (NUM_GIVEN // BLOCK_TOKENS)
    assert received > in_all / 2, f"of {in_all} blocks most were computed where they were used, or found in a cache"


@ROLES
@pytest.mark.usefixtures("rig")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_outlive_a_pod(
    role: str, number: signal.Signals, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    scenario = f"prefill and decode: {number.name} of {role}"
    strike_a_pod(scenario, role, signalling(number), own_service, start_load, verdicts)


def test_streams_outlive_a_prefill_pod_that_is_told_to_go(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    strike = telling_to_go(own_service)
    strike_a_pod("prefill and decode: prefill drained", "prefill", strike, own_service, start_load, verdicts)


def test_streams_of_a_decode_pod_that_is_told_to_go_take_their_kv_along(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    """Prompts are too short to be computed elsewhere: all that a decode pod receives is the KV of streams that move."""
    load = start_load(own_service, answers(NUM_TOKENS["decode"]), num_clients=NUM_CLIENTS, is_salted=True)
    with load as clients, watching(own_service.cluster, "pods", own_service.namespace) as pods:
        decodes = [pod for pod in own_service.pods("decode") if is_pod_ready(pod)]
        received_before = {name_of(pod): own_service.metric(pod, RECEIVED) for pod in decodes}
        moved_before, resumed_before = num_moved(own_service), num_resumed(own_service)
        victim = busy_engine(own_service, role="decode")
        struck = time.time()
        own_service.tell_to_go(victim.pod)
        what = f"{NUM_ENGINES} ready engines of {own_service.name} without {victim.pod}"
        whole = pods.first(is_whole_without(victim, NUM_ENGINES), WHOLE_WITHIN_SECONDS, what, after=struck)
        clients.wait_streams(NUM_CLIENTS)
        verdict = clients.stop()
    moved, resumed = num_moved(own_service) - moved_before, num_resumed(own_service) - resumed_before
    [other] = [pod for pod in decodes if name_of(pod) != victim.pod]
    gained = own_service.metric(other, RECEIVED) - received_before[name_of(other)]
    note = f"{moved} of {resumed} resumed streams moved, with {gained / 2**20:.1f} MiB of KV"
    verdicts.add("prefill and decode: decode drained", verdict, note, whole_again=whole - struck)
    assert not verdict.failures, verdict
    assert moved > 0, "no stream was handed over: the pod had none, or the router did not ask for them"
    assert gained > 0, "the streams that moved were computed again"
    assert verdict.longest_gap_seconds < SILENCE_LIMIT_SECONDS


def test_without_prefill_pods_decode_pods_compute_the_prompts(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    def is_missed(condition: dict[str, str]) -> bool | None:
        return (condition.get("status"), condition.get("reason")) == ("True", "NoReadyPrefill") or None

    with prompts_to_compute(own_service, start_load, 200, num_clients=4) as load:
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
        prompts_to_compute(own_service, start_load, NUM_TOKENS["decode"]) as load,
        watching(own_service.cluster, "pods", own_service.namespace) as pods,
    ):
        changed_at = time.time()
        own_service.patch({"engine": {"maxNumSeqs": 24}})
        gone_at = pods.first(
            lambda state: not old & state.keys(), WHOLE_WITHIN_SECONDS, "the old pods to go", after=changed_at
        )
        own_service.wait_ready()
        load.wait_streams(NUM_CLIENTS)
        wait_all_exchange(own_service, "prefill", "decode")
        verdict = load.stop()
    refused = sum(own_service.metric(pod, REFUSED) for pod in own_service.pods("decode"))
    verdicts.add("prefill and decode: rolling update", verdict, update=gone_at - changed_at)
    assert not verdict.failures, verdict
    assert refused == 0, "engines of two revisions were paired"


@ROLES
def test_fewer_replicas_of_a_role_end_no_stream(
    role: str, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    with (
        prompts_to_compute(own_service, start_load, NUM_TOKENS[role]) as load,
        watching(own_service.cluster, "pods", own_service.namespace) as pods,
    ):
        before, scaled_at = own_service.staying_uids(role), time.time()
        own_service.patch({"disaggregation": {role: {"replicas": 1}}})
        gone_at = pods.first(
            lambda state: len(before & state.keys()) == 1, WHOLE_WITHIN_SECONDS, f"one of {role} to go", scaled_at
        )
        own_service.wait_ready()
        load.wait_streams(NUM_CLIENTS)
        own_service.patch({"disaggregation": {role: {"replicas": len(before)}}})
        pods.first(lambda state: len(ready_engines(state)) == NUM_ENGINES, WHOLE_WITHIN_SECONDS, "all engines", gone_at)
        wait_all_exchange(own_service, role)
        verdict = load.stop()
    verdicts.add(f"prefill and decode: {role} from 2 to 1, and up", verdict, gone=gone_at - scaled_at)
    assert not verdict.failures, verdict


def strike_a_pod(
    scenario: str,
    role: str,
    strike: Callable[[Engine], None],
    service: LiveService,
    start_load: StartLoad,
    verdicts: Verdicts,
) -> None:
    load = prompts_to_compute(service, start_load, NUM_TOKENS[role])
    with load as clients, watching(service.cluster, "pods", service.namespace) as pods:
        resumed_before = num_resumed(service)
        victim = victim_of(service, role)
        struck = time.time()
        strike(victim)
        what = f"{NUM_ENGINES} ready engines of {service.name} without {victim.pod} as it was"
        whole = pods.first(is_whole_without(victim, NUM_ENGINES), WHOLE_WITHIN_SECONDS, what, after=struck)
        clients.wait_streams(NUM_CLIENTS)
        wait_all_exchange(service, role)
        verdict, resumed = clients.stop(), num_resumed(service) - resumed_before
    note = f"{resumed} streams resumed, first token within {verdict.first_token_seconds[1]:.1f} s"
    verdicts.add(scenario, verdict, note, whole_again=whole - struck)
    assert not verdict.failures, verdict
    assert resumed > 0 or role == "prefill", "the pod was struck while it had no streams"
    assert verdict.longest_gap_seconds < SILENCE_LIMIT_SECONDS


def num_moved(service: LiveService) -> int:
    """Streams so far that their engine handed over as it drained, and that another went on with."""
    return int(sum(service.metric(pod, MOVED) for pod in service.pods("router")))


def victim_of(service: LiveService, role: str) -> Engine:
    """One with streams, or with prompts, which are computed too fast to be found under way."""
    if role == "decode":
        return busy_engine(service, role=role)
    wait_all_exchange(service, role)
    return next(engine_of(pod) for pod in service.pods(role) if is_pod_ready(pod))


def wait_all_exchange(service: LiveService, *roles: str) -> None:
    """Until each ready pod of the roles has sent or received blocks since it started, also one that came back."""

    def is_done() -> bool:
        pods = [pod for role in roles for pod in service.pods(role) if is_pod_ready(pod)]
        return all(service.metric(pod, BLOCKS) > 0 for pod in pods)

    wait_until(is_done, 60, f"blocks between all pods of {service.name}", POLL_SECONDS)
