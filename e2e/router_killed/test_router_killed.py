"""Verdict by traffic: one of two routers is killed; the other's streams go on, and who asks again is served."""

import os
import signal
import time

import pytest
from e2e.cluster.rig.faults import host_pids
from e2e.conftest import StartLoad
from e2e.live_cluster import KubeObject, LiveService, is_pod_ready, uid_of
from e2e.traffic.answers import answers
from e2e.traffic.traffic import Verdict
from e2e.verdicts import Verdicts
from e2e.watch import State, watching

NUM_CLIENTS, NUM_TOKENS = 4, 200
SERVED_AGAIN_WITHIN_SECONDS = 10.0
RESTARTED_WITHIN_SECONDS = 60.0


@pytest.mark.usefixtures("rig")
def test_streams_of_the_other_router_go_on_and_who_asks_again_is_served(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    victim, other = own_service.pods("router")
    expected = answers(NUM_TOKENS)
    with (
        start_load(own_service, expected, num_clients=3, name="clients-of-the-other", url=url_of(other)) as of_other,
        start_load(own_service, expected, num_clients=NUM_CLIENTS, name="clients-of-both") as of_both,
        watching(own_service.cluster, "pods", own_service.namespace) as pods,
    ):
        killed = time.time()
        for pid in host_pids(uid_of(victim), "router"):
            os.kill(pid, signal.SIGKILL)
        what = "the killed router to be ready again"
        restarted = pods.first(lambda state: is_restarted(state, victim), RESTARTED_WITHIN_SECONDS, what, after=killed)
        of_both.wait_streams(2 * NUM_CLIENTS)
        by_other, by_both = of_other.stop(), of_both.stop()
    verdicts.add("router killed: streams of the other one", by_other)
    again = failed_until(by_both) - killed
    verdicts.add("router killed: clients of the Service", by_both, served_again=again, ready_again=restarted - killed)
    assert not by_other.failures, by_other
    # A client's connection ends with its router: what was on its way is cut, once, and nothing else is lost.
    assert by_both.count("wrong") == 0, by_both
    assert by_both.count("cut") <= NUM_CLIENTS, by_both
    assert all(each.ended >= killed for each in by_both.failures), by_both
    assert again < SERVED_AGAIN_WITHIN_SECONDS, by_both


def url_of(router: KubeObject) -> str:
    address = router["status"]["podIP"]
    return f"http://[{address}]:8080/v1" if ":" in address else f"http://{address}:8080/v1"


def is_restarted(state: State, before: KubeObject) -> bool:
    now = state.get(uid_of(before))
    return now is not None and is_pod_ready(now) and num_restarts(now) > num_restarts(before)


def num_restarts(pod: KubeObject) -> int:
    return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])


def failed_until(verdict: Verdict) -> float:
    """When the last stream failed, in seconds since the epoch; 0 where none did."""
    return max((each.ended for each in verdict.failures), default=0.0)
