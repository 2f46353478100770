"""Two replicas of two pods each through faults and changes under load: what the scenarios of groups have in common.

The names of the verdicts' rows begin with the scenario's own.
"""

import time
from collections.abc import Callable

from e2e.conftest import StartLoad
from e2e.engines import RANK_LABEL, Engine, busy_engine, engine_of, num_resumed
from e2e.live_cluster import KubeObject, LiveService, is_pod_ready, role_of
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from e2e.watch import State, watching

NUM_GROUPS, NUM_NODES, NUM_CLIENTS, NUM_TOKENS = 2, 2, 8, 600
WHOLE_WITHIN_SECONDS = 180.0
SILENCE_LIMIT_SECONDS = 20.0
GROUP = "serving.kvasir.dev/group"


def strike_a_group(
    scenario: str,
    rank: str,
    strike: Callable[[Engine], None],
    service: LiveService,
    start_load: StartLoad,
    verdicts: Verdicts,
) -> None:
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


def update_groups(scenario: str, service: LiveService, start_load: StartLoad, verdicts: Verdicts) -> None:
    old = service.staying_uids("serve")
    with (
        start_load(service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load,
        watching(service.cluster, "pods", service.namespace) as pods,
    ):
        changed_at = time.time()
        service.patch({"engine": {"maxNumSeqs": 24}})
        gone_at = pods.first(
            lambda state: not old & state.keys(), WHOLE_WITHIN_SECONDS, "the old groups to go", changed_at
        )
        service.wait_ready()
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    verdicts.add(f"{scenario}: rolling update", verdict, update=gone_at - changed_at)
    assert not verdict.failures, verdict


def scale_groups(scenario: str, service: LiveService, start_load: StartLoad, verdicts: Verdicts) -> None:
    with (
        start_load(service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load,
        watching(service.cluster, "pods", service.namespace) as pods,
    ):
        scaled_at = time.time()
        service.patch({"replicas": 1})
        gone_at = pods.first(is_one_group, WHOLE_WITHIN_SECONDS, "the pods of one group to go", scaled_at)
        service.wait_ready()
        load.wait_streams(NUM_CLIENTS)
        service.patch({"replicas": NUM_GROUPS})
        pods.first(lambda state: num_ready_groups(state) == NUM_GROUPS, WHOLE_WITHIN_SECONDS, "groups", gone_at)
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    verdicts.add(f"{scenario}: scale down from 2 to 1, and up", verdict, gone=gone_at - scaled_at)
    assert not verdict.failures, verdict


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
