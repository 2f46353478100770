"""Verdict by traffic: routers and operators are struck beside a P/D service, and beside one of pipeline groups."""

import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from e2e.cluster.rig.faults import signal_processes
from e2e.conftest import StartLoad
from e2e.engines import ENGINE_ROLES, Engine
from e2e.final_state import seconds_to_converge
from e2e.helm.helm import Helm
from e2e.live_cluster import POLL_SECONDS, LiveCluster, LiveService, deploy_service, is_terminating
from e2e.operators import StrikeTheLeader, drain_the_leader, kill_the_leader, stop_the_leader, wait_standby
from e2e.pod_groups import strike_a_group
from e2e.routers import StartClients, drain_a_router, stall_a_router, strike_a_router
from e2e.uncached_prompts import prompts_to_compute
from e2e.verdicts import Verdicts
from e2e.watch import State, watching
from tests.controlplane.processes import wait_until

SCENARIOS = {"split": "prefill and decode", "staged": "pipeline group"}
"""By the name of the service and of its manifest."""
NUM_CLIENTS, NUM_TOKENS, NUM_LONG_TOKENS = 8, 300, 600
SERVED_AGAIN_WITHIN_SECONDS = {signal.SIGKILL: 10.0, signal.SIGSTOP: 60.0}
"""A router that stands still has its clients' connections until its liveness probe has failed three times."""
STALL_SECONDS = 8.0
"""Less than that takes."""
UPDATED_WITHIN_SECONDS = 180.0

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("rig")]


@pytest.fixture(scope="module", params=SCENARIOS)
def service(request: pytest.FixtureRequest, live_cluster: LiveCluster, kvasir: Helm) -> Iterator[LiveService]:
    with live_cluster.namespace(f"struck-{request.param}") as namespace:
        deployed = deploy_service(live_cluster, Path(__file__).with_name(f"{request.param}.yaml"), namespace)
        deployed.wait_ready()
        yield deployed


@pytest.fixture
def start_clients(service: LiveService, start_load: StartLoad) -> StartClients:
    return partial(prompts_to_compute, service, start_load, NUM_TOKENS)


@pytest.mark.parametrize("number", SERVED_AGAIN_WITHIN_SECONDS)
def test_streams_of_the_other_router_go_on_and_who_asks_again_is_served(
    number: signal.Signals, service: LiveService, start_clients: StartClients, verdicts: Verdicts
) -> None:
    scenario = f"{SCENARIOS[service.name]}: {number.name} of a router"
    strike_a_router(scenario, number, SERVED_AGAIN_WITHIN_SECONDS[number], service, start_clients, verdicts)


def test_streams_of_a_router_that_stood_still_go_on(
    service: LiveService, start_clients: StartClients, verdicts: Verdicts
) -> None:
    scenario = f"{SCENARIOS[service.name]}: a router stood still for {STALL_SECONDS:.0f} s"
    stall_a_router(scenario, STALL_SECONDS, service, start_clients, verdicts)


def test_a_router_that_is_told_to_go_cuts_no_stream(
    service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    start_clients = partial(prompts_to_compute, service, start_load, NUM_LONG_TOKENS)
    drain_a_router(f"{SCENARIOS[service.name]}: a router drained", service, start_clients, verdicts)


@pytest.mark.parametrize(
    ("strike", "done", "max_num_seqs"),
    [(kill_the_leader, "killed", 15), (stop_the_leader, "stopped", 14), (drain_the_leader, "drained", 13)],
)
def test_an_update_goes_on_under_another_operator(
    strike: StrikeTheLeader,
    done: str,
    max_num_seqs: int,
    service: LiveService,
    start_clients: StartClients,
    verdicts: Verdicts,
) -> None:
    def is_begun(state: State) -> bool:
        return any(uid in old and is_terminating(pod) for uid, pod in state.items())

    old = service.staying_uids(*ENGINE_ROLES)
    wait_standby(service.cluster)
    with start_clients() as clients, watching(service.cluster, "pods", service.namespace) as pods:
        changed = time.time()
        service.patch({"engine": {"maxNumSeqs": max_num_seqs}})
        begun = pods.first(is_begun, UPDATED_WITHIN_SECONDS, "an old pod to be told to go", after=changed)
        strike(service.cluster)
        gone = pods.first(lambda state: not old & state.keys(), UPDATED_WITHIN_SECONDS, "the old pods to go", changed)
        service.wait_ready()
        converged = seconds_to_converge(service)
        clients.wait_streams(NUM_CLIENTS)
        verdict = clients.stop()
    num_left = sum(uid in old and not is_terminating(pod) for uid, pod in pods.at(begun).items())
    scenario = f"{SCENARIOS[service.name]}: operator {done} in a rolling update"
    note = f"{num_left} of {len(old)} pods were still to be told"
    verdicts.add(scenario, verdict, note, update=gone - changed, converged=converged)
    assert not verdict.failures, verdict
    assert num_left > 0, "the operator had nothing left to do when it was struck"


@pytest.mark.parametrize("service", ["staged"], indirect=True)
@pytest.mark.parametrize(("moment", "number"), [("before", signal.SIGSTOP), ("during", signal.SIGKILL)])
def test_a_group_is_made_anew_under_another_operator(
    moment: str, number: signal.Signals, service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    """A stopped pod fails its group, which cannot come back without it. A killed one comes back in place, and the group
    may be ready again before another operator leads and finds anything to do."""

    def is_begun() -> bool:
        return any(map(is_terminating, service.pods("serve")))

    def strike(victim: Engine) -> None:
        signal_processes(victim.uid, "engine", number)
        if moment == "during":
            wait_until(is_begun, 60, f"the operator to restart the group of {victim.pod}", POLL_SECONDS)
        kill_the_leader(service.cluster)

    wait_standby(service.cluster)
    scenario = f"{SCENARIOS[service.name]}: operator killed {moment} a group's restart"
    strike_a_group(scenario, "1", strike, service, start_load, verdicts)
