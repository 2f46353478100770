"""One of two routers through a fault under load: what the scenarios of routers have in common.

A router that dies cuts the streams that it carries: nobody else has their clients' connections. Its clients are counted
apart from those of the other router, whose streams do not notice.
"""

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from e2e.cluster.rig.faults import signal_processes
from e2e.engines import wait_idle
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveService, is_pod_ready, name_of, uid_of
from e2e.traffic.traffic import Load
from e2e.verdicts import Verdicts
from e2e.watch import State, watching
from tests.controlplane.processes import wait_until

NUM_CLIENTS_OF_THE_OTHER, NUM_CLIENTS = 3, 4
RESTARTED_WITHIN_SECONDS = 120.0
IN_FLIGHT = "kvasir_router_in_flight"
PRE_STOP_SECONDS = 5.0
"""That a router which is told to go serves on as if it were not."""
StartClients = Callable[..., AbstractContextManager[Load]]
"""`load` with the streams that clients ask for."""


def strike_a_router(
    scenario: str,
    number: signal.Signals,
    served_again_within_seconds: float,
    service: LiveService,
    start_clients: StartClients,
    verdicts: Verdicts,
) -> None:
    """One gets the signal, and its kubelet restarts it."""
    victim, other = sorted(service.pods("router"), key=num_restarts)
    of_the_other = {"name": "clients-of-the-other", "num_clients": NUM_CLIENTS_OF_THE_OTHER, "url": url_of(other)}
    with (
        start_clients(**of_the_other) as of_other,
        start_clients(name="clients-of-both", num_clients=NUM_CLIENTS) as of_both,
        watching(service.cluster, "pods", service.namespace) as pods,
    ):
        wait_busy(service, victim)
        struck = time.time()
        signal_processes(uid_of(victim), "router", number)
        what = "the struck router to be ready again"
        restarted = pods.first(lambda state: is_restarted(state, victim), RESTARTED_WITHIN_SECONDS, what, after=struck)
        of_both.wait_streams(2 * NUM_CLIENTS)
        by_other, by_both = of_other.stop(), of_both.stop()
        wait_idle(service)
    verdicts.add(f"{scenario}: streams of the other one", by_other)
    again = max((each.ended for each in by_both.failures), default=struck) - struck
    verdicts.add(f"{scenario}: clients of the Service", by_both, served_again=again, ready_again=restarted - struck)
    assert not by_other.failures, by_other
    # A client's connection ends with its router: what was on its way is cut, once, and nothing else is lost.
    assert by_both.count("wrong") == 0, by_both
    assert by_both.count("cut") <= NUM_CLIENTS, by_both
    assert all(each.ended >= struck for each in by_both.failures), by_both
    assert again < served_again_within_seconds, by_both


def stall_a_router(
    scenario: str, seconds: float, service: LiveService, start_clients: StartClients, verdicts: Verdicts
) -> None:
    """It is stopped, and goes on before its kubelet would restart it."""
    victim = min(service.pods("router"), key=num_restarts)
    with start_clients(num_clients=2 * NUM_CLIENTS) as clients:
        wait_busy(service, victim)
        signal_processes(uid_of(victim), "router", signal.SIGSTOP)
        time.sleep(seconds)  # the scenario itself
        signal_processes(uid_of(victim), "router", signal.SIGCONT)
        clients.wait_streams(2 * NUM_CLIENTS)
        verdict = clients.stop()
        wait_idle(service)
    verdicts.add(scenario, verdict)
    assert not verdict.failures, verdict
    assert verdict.longest_gap_seconds >= seconds / 2, "no stream noticed that its router stood still"


def drain_a_router(scenario: str, service: LiveService, start_clients: StartClients, verdicts: Verdicts) -> None:
    """Its pod is deleted as by a node's drain, and another one comes."""
    with (
        start_clients(num_clients=2 * NUM_CLIENTS) as clients,
        watching(service.cluster, "pods", service.namespace) as pods,
    ):
        victim = service.pods("router")[0]
        wait_busy(service, victim)
        told = time.time()
        service.tell_to_go(name_of(victim))
        gone = pods.first(lambda state: uid_of(victim) not in state, 180, f"{name_of(victim)} to go", after=told)
        service.wait_ready()
        clients.wait_streams(2 * NUM_CLIENTS)
        verdict = clients.stop()
        wait_idle(service)
    verdicts.add(scenario, verdict, gone=gone - told, longest_stream=verdict.longest_stream_seconds)
    assert not verdict.failures, verdict
    assert verdict.longest_stream_seconds > PRE_STOP_SECONDS, "every stream had ended before the router was stopped"


def wait_busy(service: LiveService, router: KubeObject) -> None:
    what = f"streams at {name_of(router)}"
    wait_until(lambda: service.metric(router, IN_FLIGHT) > 0, 60, what, POLL_SECONDS)


def url_of(router: KubeObject) -> str:
    address = router["status"]["podIP"]
    return f"http://[{address}]:8080/v1" if ":" in address else f"http://{address}:8080/v1"


def is_restarted(state: State, before: KubeObject) -> bool:
    now = state.get(uid_of(before))
    return now is not None and is_pod_ready(now) and num_restarts(now) > num_restarts(before)


def num_restarts(pod: KubeObject) -> int:
    return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])
