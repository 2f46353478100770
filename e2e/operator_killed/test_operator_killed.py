"""Verdict by traffic and by the final state: operators die in the middle of updates, and the API server goes away.

Serving must not notice either: what operator and API server decide is carried out by kubelets and routers, which go on.
"""

import random
import time
from datetime import UTC, datetime

import pytest
from e2e.cluster.rig.faults import api_server_stopped
from e2e.conftest import StartLoad
from e2e.final_state import seconds_to_converge
from e2e.live_cluster import KubeObject, LiveService, name_of
from e2e.operators import delete_the_leader, kill_the_leader
from e2e.traffic.answers import answers
from e2e.traffic.traffic import Verdict
from e2e.verdicts import Verdicts

SEED = 4
NUM_CLIENTS, NUM_TOKENS = 8, 300
UNDISTURBED: KubeObject = {"engine": {"maxNumSeqs": 14}}
UPDATES: tuple[KubeObject, ...] = (
    {"engine": {"maxNumSeqs": 12}},
    {"replicas": 3},
    {"pod": {"serviceAccountName": "default"}},  # drops a child besides
    {"replicas": 2},
)
OUTAGE_SECONDS = 30.0

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("rig")]


def test_streams_do_not_notice_operators_that_die_in_the_middle_of_updates(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    moments = random.Random(SEED)
    with start_load(own_service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load:
        own_service.patch(UNDISTURBED)
        own_service.wait_ready()
        first_kill = time.time()
        for update in UPDATES:
            strike_the_leader_during(update, own_service, moments)
        converged = seconds_to_converge(own_service)
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    before = Verdict(tuple(each for each in verdict.outcomes if each.ended < first_kill))
    after = Verdict(tuple(each for each in verdict.outcomes if each.ended >= first_kill))
    verdicts.add("operator killed: an update before", before)
    verdicts.add(f"operator killed in each of {len(UPDATES)} updates", after, converged=converged)
    assert not verdict.failures, verdict
    assert after.longest_gap_seconds < 2 * before.longest_gap_seconds + 1.0


def test_streams_do_not_notice_that_the_api_server_is_away(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    with start_load(own_service, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load:
        own_service.patch({"engine": {"maxNumSeqs": 10}})
        time.sleep(random.Random(SEED).uniform(0, 2))
        with api_server_stopped():
            gone = time.time()
            time.sleep(OUTAGE_SECONDS)  # the scenario itself
            back = time.time()
        converged = seconds_to_converge(own_service)
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
    verdicts.add(f"API server away for {OUTAGE_SECONDS:.0f} s, during an update", verdict, converged=converged)
    assert not verdict.failures, verdict
    assert sum(each.started > gone and each.ended < back for each in verdict.outcomes) >= NUM_CLIENTS
    log = router_log(own_service, gone)
    assert "keeping the last known ones" in log
    assert "endpoints: none" not in log


def strike_the_leader_during(update: KubeObject, service: LiveService, moments: random.Random) -> None:
    """Within a second after the update, by SIGKILL or by deletion without grace; returns when another leads."""
    service.patch(update)
    time.sleep(moments.uniform(0, 1))  # the scenario itself
    moments.choice((kill_the_leader, delete_the_leader))(service.cluster)


def router_log(service: LiveService, since: float) -> str:
    [router] = service.pods("router")
    moment = datetime.fromtimestamp(since, UTC).isoformat()
    namespace = f"--namespace={service.namespace}"
    return service.cluster.kubectl("logs", name_of(router), namespace, f"--since-time={moment}")
