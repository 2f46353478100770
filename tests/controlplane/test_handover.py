"""Who leads after a leader was killed amid its first pass, and after one was paused and woken again.

The Lease's timing is real, in proportion to the default one, which tests/operator/kube has by a clock of its own.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from kvasir_operator.kube.kinds import LEASE, SERVICE
from kvasir_operator.kube.leadership import OWN_LEASE
from kvasir_operator.kube.lease import LeaseTiming
from kvasir_operator.settings import OperatorSettings

from .control_plane import ControlPlane
from .fake_answers import prometheus
from .operator_process import OperatorProcess, forked_operator
from .processes import wait_until
from .reconciling import get_children, manifest, path_of, run_pass
from .rights import account, changes, role_kubeconfig
from .test_operator_process import MERGE_PATCH, PODS, metric, wait_for_children, wait_for_phase

LEADER, STANDBY = "leader", "standby"
LEASE_SECONDS = 6
TAKEN_OVER_SECONDS = 20.0  # of which the Lease itself takes up to 7.6
SCALED: dict[str, Any] = {"replicas": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 2}}
KILLED, PAUSED = "leader-killed", "leader-paused"


@dataclass(frozen=True)
class HandOver:
    """Two operators in a namespace of theirs: one led, and the other one stood by and leads now."""

    namespace: str
    leader: OperatorProcess
    standby: OperatorProcess
    seconds: float
    """From the leader's end until the other one led."""


@dataclass(frozen=True)
class HandOvers:
    killed: HandOver
    paused: HandOver
    asked_before: int
    """Questions to Prometheus, of which only the second standby knows, until it led."""
    asked: list[None]
    """All of them."""


@pytest.fixture(scope="module")
def hand_overs(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandOvers]:
    """Both at once, since either is a wait for a Lease to run out."""
    directory, asked = tmp_path_factory.mktemp("hand-over"), list[None]()
    with ExitStack() as stack:

        def start(namespace: str, name: str, *flags: str) -> OperatorProcess:
            """With a ServiceAccount of its own, by which its requests can be told from the other one's."""
            kubeconfig = role_kubeconfig(control_plane, namespace, directory, name)
            flags = (f"--namespace={namespace}", "--leader-election", f"--lease-seconds={LEASE_SECONDS}", *flags)
            log = directory / f"{namespace}-{name}.log"
            return stack.enter_context(forked_operator(kubeconfig, log, *flags))

        def answer() -> list[tuple[dict[str, str], float]]:
            asked.append(None)
            return []

        for namespace in (KILLED, PAUSED):
            control_plane.create_namespace(namespace)
            stack.callback(control_plane.delete_namespace, namespace)
        leaders = [start(KILLED, LEADER, "--workers=1"), start(PAUSED, LEADER)]
        for leader in leaders:
            wait_until(partial(leads, leader), 40, f"{leader.log} to lead")
        url = stack.enter_context(prometheus(answer))
        standbys = [start(KILLED, STANDBY), start(PAUSED, STANDBY, f"--prometheus-url={url}")]
        for standby in standbys:
            standby.word_after("standing by: ")

        control_plane.apply(manifest(KILLED))
        written = partial(changes, control_plane, account(KILLED, LEADER), KILLED, "serviceaccounts")
        wait_until(written, 40, "the first write")
        killed_at = stop(leaders[0], signal.SIGKILL)
        control_plane.apply(manifest(PAUSED, **SCALED))
        wait_for_children(control_plane, PAUSED, **SCALED)
        paused_at = stop(leaders[1], signal.SIGSTOP)
        asked_before = len(asked)
        led_at = [when_led(standby) for standby in standbys]
        killed, paused = (
            HandOver(namespace, leader, standby, (led - stopped).total_seconds())
            for namespace, leader, standby, led, stopped in zip(
                (KILLED, PAUSED), leaders, standbys, led_at, (killed_at, paused_at), strict=True
            )
        )
        yield HandOvers(killed, paused, asked_before, asked)


def stop(leader: OperatorProcess, number: signal.Signals) -> datetime:
    """Returns when, by the clock that logs have."""
    leader.process.send_signal(number)
    return datetime.now()


def leads(operator: OperatorProcess) -> bool:
    return metric(operator, "kvasir_operator_leader") == 1.0


def when_led(standby: OperatorProcess) -> datetime:
    wait_until(partial(leads, standby), 40, f"{standby.log} to lead")
    [time] = re.findall(r"^(\S+ \S+) \w+ \S+: leading$", standby.log.read_text(), re.MULTILINE)
    return datetime.fromisoformat(time.replace(",", "."))


def test_a_standby_leads_soon_and_not_before_the_leader_had_to_give_up(hand_overs: HandOvers) -> None:
    for hand_over in (hand_overs.killed, hand_overs.paused):
        assert LeaseTiming.of(LEASE_SECONDS).renew_deadline_seconds < hand_over.seconds < TAKEN_OVER_SECONDS


def test_a_standby_asks_prometheus_nothing_until_it_leads(hand_overs: HandOvers) -> None:
    assert hand_overs.asked_before == 0
    wait_until(lambda: hand_overs.asked, 30, "the leader to ask")


def test_a_killed_leader_is_continued_by_the_next_one_which_ends_cleanly(
    control_plane: ControlPlane, hand_overs: HandOvers
) -> None:
    pair = hand_overs.killed
    wait_for_children(control_plane, pair.namespace)
    control_plane.mark_pods_ready(pair.namespace, PODS, 4)
    wait_for_phase(control_plane, pair.namespace, "Ready")
    status, seconds = pair.standby.stop()
    assert (status, seconds < 10.0) == (0, True), pair.standby.log.read_text()
    # Nothing is left to do for a third operator, so all is as if there had only been one.
    assert run_pass(control_plane, pair.namespace, settings=OperatorSettings(namespace=(pair.namespace,))).writes == []


def test_a_paused_leader_that_wakes_up_again_writes_nothing_and_ends(
    control_plane: ControlPlane, hand_overs: HandOvers
) -> None:
    pair = hand_overs.paused
    before = changes(control_plane, account(pair.namespace, LEADER), pair.namespace)
    for key in get_children(control_plane, pair.namespace):
        if key.kind == SERVICE:  # either operator would put it back
            control_plane.request("delete", path_of(SERVICE, pair.namespace, key.name))
    pair.leader.process.send_signal(signal.SIGCONT)
    assert pair.leader.process.wait(20) == 1
    assert "another may lead" in pair.leader.log.read_text() or "took Lease" in pair.leader.log.read_text()
    assert changes(control_plane, account(pair.namespace, LEADER), pair.namespace) == before
    wait_for_children(control_plane, pair.namespace, **SCALED)
    assert changes(control_plane, account(pair.namespace, STANDBY), pair.namespace)


def test_a_leader_whose_lease_is_taken_ends_at_once(control_plane: ControlPlane, hand_overs: HandOvers) -> None:
    """The one that took over from the paused one: the last that is asked of it."""
    pair = hand_overs.paused
    assert leads(pair.standby)
    theft = {"spec": {"holderIdentity": "usurper", "leaseDurationSeconds": 60}}
    control_plane.request("patch", path_of(LEASE, pair.namespace, OWN_LEASE), theft, MERGE_PATCH)
    assert pair.standby.process.wait(20) == 1
    assert "usurper took Lease" in pair.standby.log.read_text()
