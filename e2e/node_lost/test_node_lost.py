"""Verdict by traffic: the node under one of two engines is drained, and then lost without a word.

The router and the clients are on other nodes: a stream whose client or router is lost has nobody to go on for.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from e2e.cluster.rig.faults import node_lost
from e2e.conftest import StartLoad
from e2e.engine_processes import all_processes
from e2e.engines import Engine, busy_engine, is_whole_without, num_resumed, ready_engines
from e2e.live_cluster import POLL_SECONDS, KubectlError, LiveCluster, LiveService, holds, is_terminating, name_of
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from e2e.watch import State, watching
from tests.controlplane.processes import wait_until

NUM_ENGINES, NUM_CLIENTS, NUM_TOKENS = 2, 8, 1000
REPLACED_WITHIN_SECONDS = 180.0
SILENCE_LIMIT_SECONDS = 15.0

pytestmark = pytest.mark.timeout(600)


def test_draining_a_node_takes_one_engine_at_a_time_and_no_stream(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    home = home_of_the_router(own_service)
    load = start_load(own_service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS, node=home)
    with load as clients, watching(own_service.cluster, "pods", own_service.namespace) as pods:
        victim, resumed_before = busy_engine(own_service, lambda engine: engine.node != home), num_resumed(own_service)
        [other] = [engine for engine in ready_engines(pods.at(time.time())) if engine != victim]
        started = time.time()
        with being_drained(own_service.cluster, victim.node) as drain:
            pods.first(lambda state: is_told_to_go(victim, state), 60, f"{victim.pod} to be evicted", after=started)
            assert "disruption budget" in refusal_to_evict(own_service, other)
            assert drain.wait(120) == 0
            drained = time.time()
            whole = pods.first(is_whole_without(victim, NUM_ENGINES), REPLACED_WITHIN_SECONDS, "a new engine", started)
            wait_until(lambda: not refusal_to_evict(own_service, other), 30, "the budget to allow it", POLL_SECONDS)
            assert victim.node not in {engine.node for engine in ready_engines(pods.at(whole))}
        clients.wait_streams(NUM_CLIENTS)
        verdict, resumed = clients.stop(), num_resumed(own_service) - resumed_before
    times = {"drained": drained - started, "whole_again": whole - started}
    verdicts.add("node drained", verdict, f"{resumed} streams resumed", **times)
    assert not verdict.failures, verdict
    assert resumed > 0, "every stream ended within drainTimeout: they are too short"


@pytest.mark.usefixtures("rig")
def test_streams_outlive_the_node_of_their_engine(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    home = home_of_the_router(own_service)
    load = start_load(own_service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS, node=home)
    with load as clients, watching(own_service.cluster, "pods", own_service.namespace) as pods:
        victim, resumed_before = busy_engine(own_service, lambda engine: engine.node != home), num_resumed(own_service)
        left_behind = all_processes(victim)
        started = time.time()
        with node_lost(victim.node):
            whole = pods.first(is_whole_without(victim, NUM_ENGINES), REPLACED_WITHIN_SECONDS, "a new engine", started)
            clients.wait_streams(NUM_CLIENTS)
            assert all_processes(victim) == left_behind, "the node was not lost: its engine has ended"
        back = time.time()
        clean = pods.first(lambda state: victim.pod not in map(name_of, state.values()), 120, "the old pod to go", back)
        wait_until(lambda: not all_processes(victim), 30, "the processes of the old pod to end", POLL_SECONDS)
        wait_until(
            lambda: is_node_ready(own_service.cluster, victim.node), 60, f"{victim.node} to be ready", POLL_SECONDS
        )
        verdict, resumed = clients.stop(), num_resumed(own_service) - resumed_before
    times = {"replaced": whole - started, "clean_after_return": clean - back}
    verdicts.add("node lost", verdict, f"{resumed} streams resumed", **times)
    assert not verdict.failures, verdict
    assert resumed > 0, "the node was lost while its engine had no streams"
    assert verdict.longest_gap_seconds < SILENCE_LIMIT_SECONDS


def home_of_the_router(service: LiveService) -> str:
    [router] = service.pods("router")
    return str(router["spec"]["nodeName"])


def is_told_to_go(victim: Engine, pods: State) -> bool:
    return not any(name_of(pod) == victim.pod and not is_terminating(pod) for pod in pods.values())


def refusal_to_evict(service: LiveService, engine: Engine) -> str:
    """What the API server says against an eviction, by a dry run; empty when it would allow it."""
    path = f"/api/v1/namespaces/{service.namespace}/pods/{engine.pod}/eviction"
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": engine.pod, "namespace": service.namespace},
        "deleteOptions": {"dryRun": ["All"]},
    }
    try:
        service.cluster.kubectl("create", "--raw", path, "-f", "-", text=json.dumps(eviction))
    except KubectlError as error:
        return str(error)
    return ""


@contextmanager
def being_drained(cluster: LiveCluster, node: str) -> Iterator[subprocess.Popen[str]]:
    """The `kubectl drain` that runs; the node takes pods again afterwards."""
    command = cluster.command("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
    try:
        with subprocess.Popen(command, env=cluster.environment, text=True) as drain:
            yield drain
    finally:
        cluster.kubectl("uncordon", node)


def is_node_ready(cluster: LiveCluster, name: str) -> bool:
    return holds(cluster.get("node", name) or {}, "Ready")
