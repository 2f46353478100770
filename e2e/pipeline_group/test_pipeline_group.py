"""Verdict by traffic: a pod of a group is killed, stopped or drained; groups of a new revision come, and one goes."""

import os
import signal
import time
from collections.abc import Callable

import pytest
from e2e.conftest import StartLoad
from e2e.engine_processes import all_processes
from e2e.engines import RANK_LABEL, Engine, busy_engine, engine_of, num_resumed
from e2e.live_cluster import KubeObject, LiveService, is_pod_ready, role_of
from e2e.traffic.answers import answers
from e2e.traffic.traffic import Verdict
from e2e.verdicts import Verdicts
from e2e.watch import State, watching

NUM_GROUPS, NUM_NODES, NUM_CLIENTS, NUM_TOKENS = 2, 2, 8, 600
WHOLE_WITHIN_SECONDS = 180.0
SILENCE_LIMIT_SECONDS = 20.0
GROUP = "serving.kvasir.dev/group"
RANKS = pytest.mark.parametrize("rank", ["0", "1"], ids=["the first pod", "the second pod"])

pytestmark = pytest.mark.timeout(600)


@RANKS
@pytest.mark.usefixtures("rig")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_outlive_a_pod_of_their_group(
    rank: str, number: signal.Signals, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    def strike(victim: Engine) -> None:
        for pid in all_processes(victim):
            os.kill(pid, number)

    strike_a_group(f"pipeline group: {number.name} of rank {rank}", rank, strike, own_service, start_load, verdicts)


@RANKS
def test_a_pod_that_is_told_to_go_takes_its_group_along_and_no_stream(
    rank: str, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    def delete(victim: Engine) -> None:
        own_service.cluster.kubectl("delete", "pod", victim.pod, f"--namespace={own_service.namespace}", "--wait=false")

    strike_a_group(f"pipeline group: rank {rank} drained", rank, delete, own_service, start_load, verdicts)


def test_an_update_replaces_whole_groups(own_service: LiveService, start_load: StartLoad, verdicts: Verdicts) -> None:
    old = own_service.staying_uids("serve")
    with (
        start_load(own_service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load,
        watching(own_service.cluster, "pods", own_service.namespace) as pods,
    ):
        changed_at = time.time()
        own_service.patch({"engine": {"maxNumSeqs": 24}})
        gone_at = pods.first(
            lambda state: not old & state.keys(), WHOLE_WITHIN_SECONDS, "the old groups to go", changed_at
        )
        own_service.wait_ready()
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    verdicts.add("pipeline group: rolling update", verdict, update=gone_at - changed_at)
    assert not verdict.failures, verdict


def test_fewer_replicas_take_a_whole_group_along_and_no_stream(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    with (
        start_load(own_service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load,
        watching(own_service.cluster, "pods", own_service.namespace) as pods,
    ):
        scaled_at = time.time()
        own_service.patch({"replicas": 1})
        gone_at = pods.first(is_one_group, WHOLE_WITHIN_SECONDS, "the pods of one group to go", scaled_at)
        own_service.wait_ready()
        load.wait_streams(NUM_CLIENTS)
        own_service.patch({"replicas": NUM_GROUPS})
        pods.first(lambda state: num_ready_groups(state) == NUM_GROUPS, WHOLE_WITHIN_SECONDS, "groups", gone_at)
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    verdicts.add("pipeline group: scale down from 2 to 1, and up", verdict, gone=gone_at - scaled_at)
    assert not verdict.failures, verdict


def strike_a_group(
    scenario: str,
    rank: str,
    strike: Callable[[Engine], None],
    service: LiveService,
    start_load: StartLoad,
    verdicts: Verdicts,
) -> Verdict:
    load = start_load(service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS)
    with load as clients, watching(service.cluster, "pods", service.namespace) as pods:
        leader, resumed_before = busy_engine(service), num_resumed(service)
        group = group_of(pods.at(time.time())[leader.uid])
        members = {uid: pod for uid, pod in pods.at(time.time()).items() if group_of(pod) == group}
        [victim] = [pod for pod in members.values() if pod["metadata"]["labels"][RANK_LABEL] == rank]
        struck = time.time()
        strike(engine_of(victim))
        anew = pods.first(
            lambda state: not members.keys() & state.keys(), WHOLE_WITHIN_SECONDS, f"new pods of {group}", after=struck
        )
        whole = pods.first(lambda state: num_ready_groups(state) == NUM_GROUPS, WHOLE_WITHIN_SECONDS, "groups", anew)
        clients.wait_streams(NUM_CLIENTS)
        verdict, resumed = clients.stop(), num_resumed(service) - resumed_before
    verdicts.add(scenario, verdict, f"{resumed} streams resumed", anew=anew - struck, whole_again=whole - struck)
    assert not verdict.failures, verdict
    assert resumed > 0, "the group was struck while it had no streams"
    assert verdict.longest_gap_seconds < SILENCE_LIMIT_SECONDS
    return verdict


def group_of(pod: KubeObject) -> str | None:
    group: str | None = pod["metadata"].get("labels", {}).get(GROUP)
    return group


def is_one_group(state: State) -> bool:
    """Whether no pod of another is left, and all of its own are ready."""
    return num_ready_groups(state) == 1 and sum(role_of(pod) == "serve" for pod in state.values()) == NUM_NODES


def num_ready_groups(state: State) -> int:
    """Those all of whose pods are ready."""
    ready = [group_of(pod) for pod in state.values() if role_of(pod) == "serve" and is_pod_ready(pod)]
    return sum(ready.count(group) == NUM_NODES for group in set(ready))
