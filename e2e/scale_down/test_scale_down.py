"""Verdict by traffic: what clients saw while `kubectl scale` took two of three engines away, then gave one back."""

import json
import time

from e2e.conftest import StartLoad
from e2e.engines import num_resumed
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveService, is_pod_ready, is_terminating, name_of, role_of
from e2e.traffic.answers import LONGEST, answers
from e2e.traffic.traffic import Verdict
from e2e.verdicts import Verdicts
from e2e.watch import State, watching
from tests.controlplane.processes import wait_until

NUM_LONG, NUM_SHORT, MARGIN = 9, 4, 2
"""Clients of long streams, all on the first engine; of short ones, which go to the others; requests between the two."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
ANSWERED = "kvasir_e2e_request_latency_seconds_count"


def test_the_replicas_with_the_least_work_drain_and_go(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    [first] = own_service.pods("serve")
    with (
        start_load(own_service, answers(LONGEST), num_clients=NUM_LONG, name="long") as long,
        watching(own_service.cluster, "pods", own_service.namespace) as pods,
    ):
        scale(own_service, 3)  # its streams have just begun, and stay where they are
        own_service.wait_ready()
        before = own_service.staying_uids("serve")
        with start_load(own_service, answers(400), num_clients=NUM_SHORT, name="short") as short:
            loads = {name_of(pod): num_requests(own_service, pod) for pod in own_service.pods("serve")}
            scaled_at = time.time()
            scale(own_service, 1)
            told_at = pods.first(
                lambda state: len(going(state, before)) == 2, 60, "two pods to be told to go", scaled_at
            )
            gone_at = pods.first(lambda state: len(before & state.keys()) == 1, 120, "two pods to go", after=told_at)
            short.wait_streams(NUM_SHORT)
            verdict = Verdict((*short.stop().outcomes, *long.stop().outcomes))
    marked = {name_of(pod) for pod in pods.at(told_at).values() if is_marked(pod)}
    gone = {name_of(pod) for pod in going(pods.at(told_at), before)}
    verdicts.add(
        "scale down from 3 to 1",
        verdict,
        f"engines with {sorted(loads[name] for name in gone)} of {sorted(loads.values())} requests went, "
        f"{num_resumed(own_service):.0f} streams resumed",
        told_to_go=told_at - scaled_at,
        gone=gone_at - scaled_at,
    )
    assert not verdict.failures, verdict
    others = loads.keys() - {name_of(first)}
    assert loads[name_of(first)] > MARGIN + max(loads[name] for name in others), f"{loads}: no engine is the busiest"
    assert gone == others, "the replicas with the least work go"
    assert gone == marked, "the operator names them"
    assert any(each.started < told_at < each.ended for each in verdict.outcomes), "no stream was under way"


def test_a_further_replica_takes_its_share(own_service: LiveService, start_load: StartLoad, verdicts: Verdicts) -> None:
    scale(own_service, 1)
    own_service.wait_ready()
    before = own_service.staying_uids("serve")
    with (
        start_load(own_service, answers(200), num_clients=5) as load,
        watching(own_service.cluster, "pods", own_service.namespace) as pods,
    ):
        scaled_at = time.time()
        scale(own_service, 2)
        ready_at = pods.first(lambda state: bool(ready_engines_besides(before, state)), 120, "a second engine")
        [new] = ready_engines_besides(before, pods.at(ready_at))
        wait_until(lambda: own_service.metric(new, ANSWERED) > 0, 60, "an answer of the new engine", POLL_SECONDS)
        answered_at = time.time()
        verdict = load.stop()
    verdicts.add(
        "scale up from 1 to 2",
        verdict,
        ready=ready_at - scaled_at,
        first_answer=answered_at - scaled_at,
    )
    assert not verdict.failures, verdict


def scale(service: LiveService, replicas: int) -> None:
    name, namespace = f"inferenceservice/{service.name}", f"--namespace={service.namespace}"
    service.cluster.kubectl("scale", name, namespace, f"--replicas={replicas}")


def going(state: State, engines: set[str]) -> list[KubeObject]:
    return [pod for uid, pod in state.items() if uid in engines and is_terminating(pod)]


def is_marked(pod: KubeObject) -> bool:
    return DELETION_COST in pod["metadata"].get("annotations", {})


def ready_engines_besides(old: set[str], state: State) -> list[KubeObject]:
    return [pod for uid, pod in state.items() if role_of(pod) == "serve" and is_pod_ready(pod) and uid not in old]


def num_requests(service: LiveService, pod: KubeObject) -> int:
    """What the engine tells the operator when it asks."""
    path = f"/api/v1/namespaces/{service.namespace}/pods/{name_of(pod)}:8000/proxy/load"
    return int(json.loads(service.cluster.kubectl("get", "--raw", path))["server_load"])
