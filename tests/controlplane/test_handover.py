"""Who leads after a leader was killed, and after one was paused and woken again, with the Lease's real timing."""

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from kvasir_operator.kube.kinds import SERVICE
from kvasir_operator.kube.lease import LeaseTiming

from .control_plane import ControlPlane, Write
from .operator_process import OperatorProcess, running_operator
from .processes import wait_until
from .reconciling import get_children, manifest, path_of
from .rights import account, role_kubeconfig
from .test_operator_process import metric, wait_for_children

LEADER, STANDBY = "leader", "standby"
TAKEN_OVER_SECONDS = 20.0  # of which the Lease itself takes up to 19
READS = ("get", "list", "watch")


@dataclass(frozen=True)
class Pair:
    """Two operators in a namespace of theirs: one leads, or did, and the other one stands by."""

    namespace: str
    leader: OperatorProcess
    standby: OperatorProcess

    def stop_leader(self, number: signal.Signals) -> datetime:
        """Returns when, by the clock that logs have."""
        self.leader.process.send_signal(number)
        return datetime.now()

    def wait_for_standby(self) -> datetime:
        """Returns when it led."""
        wait_until(lambda: leads(self.standby), 40, f"{self.standby.log} to lead")
        [time] = re.findall(r"^(\S+ \S+) \w+ \S+: leading$", self.standby.log.read_text(), re.MULTILINE)
        return datetime.fromisoformat(time.replace(",", "."))


@dataclass(frozen=True)
class HandOver:
    pair: Pair
    seconds: float
    """From the leader's end until the other one led."""


@pytest.fixture(scope="module")
def hand_overs(
    control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[signal.Signals, HandOver]]:
    """By what stopped the leader. Both at once, since either is a wait for a Lease to run out."""
    directory = tmp_path_factory.mktemp("hand-over")
    with ExitStack() as stack:
        namespaces = ["leader-killed", "leader-paused"]
        leaders = [start(stack, control_plane, namespace, LEADER, directory) for namespace in namespaces]
        for namespace, leader in zip(namespaces, leaders, strict=True):
            wait_until(lambda leader=leader: leads(leader), 40, f"{leader.log} to lead")  # type: ignore[misc]
            control_plane.apply(manifest(namespace))
            wait_for_children(control_plane, namespace)
        standbys = [start(stack, control_plane, namespace, STANDBY, directory) for namespace in namespaces]
        for standby in standbys:
            standby.word_after("standing by: ")
        pairs = [Pair(*each) for each in zip(namespaces, leaders, standbys, strict=True)]
        how = (signal.SIGKILL, signal.SIGSTOP)
        stopped_at = [pair.stop_leader(number) for pair, number in zip(pairs, how, strict=True)]
        led_at = [pair.wait_for_standby() for pair in pairs]
        seconds = [(led - stopped).total_seconds() for led, stopped in zip(led_at, stopped_at, strict=True)]
        yield {number: HandOver(*each) for number, *each in zip(how, pairs, seconds, strict=True)}


def start(stack: ExitStack, control_plane: ControlPlane, namespace: str, name: str, directory: Path) -> OperatorProcess:
    """With a ServiceAccount of its own, by which its requests can be told from the other one's."""
    if name == LEADER:
        control_plane.create_namespace(namespace)
        stack.callback(control_plane.delete_namespace, namespace)
    kubeconfig = role_kubeconfig(control_plane, namespace, directory, name)
    flags = (f"--namespace={namespace}", "--leader-election")
    return stack.enter_context(running_operator(kubeconfig, directory / f"{namespace}-{name}.log", *flags))


def leads(operator: OperatorProcess) -> bool:
    return metric(operator, "kvasir_operator_leader") == 1.0


def changes(control_plane: ControlPlane, namespace: str, name: str) -> list[Write]:
    """What this operator changed so far."""
    writes = control_plane.writes(account(namespace, name))
    return [write for write in writes if write.verb not in READS and write.status < 400]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "paused"])
def test_a_standby_leads_within_20_s_and_not_before_the_leader_had_to_give_up(
    hand_overs: dict[signal.Signals, HandOver], number: signal.Signals
) -> None:
    assert LeaseTiming().renew_deadline_seconds < hand_overs[number].seconds < TAKEN_OVER_SECONDS


def test_a_killed_leaders_work_is_gone_on_with(
    control_plane: ControlPlane, hand_overs: dict[signal.Signals, HandOver]
) -> None:
    namespace = hand_overs[signal.SIGKILL].pair.namespace
    delete_services(control_plane, namespace)
    wait_for_children(control_plane, namespace)


def test_a_paused_leader_that_wakes_up_again_writes_nothing_and_ends(
    control_plane: ControlPlane, hand_overs: dict[signal.Signals, HandOver]
) -> None:
    pair = hand_overs[signal.SIGSTOP].pair
    before = changes(control_plane, pair.namespace, LEADER)
    delete_services(control_plane, pair.namespace)  # either would put them back
    pair.leader.process.send_signal(signal.SIGCONT)
    assert pair.leader.process.wait(20) == 1
    assert "another may lead" in pair.leader.log.read_text() or "took Lease" in pair.leader.log.read_text()
    assert changes(control_plane, pair.namespace, LEADER) == before
    wait_for_children(control_plane, pair.namespace)
    assert changes(control_plane, pair.namespace, STANDBY)


def delete_services(control_plane: ControlPlane, namespace: str) -> None:
    """Kubernetes' Services, one a role's revision and one of the routers."""
    for key in get_children(control_plane, namespace):
        if key.kind == SERVICE:
            control_plane.request("delete", path_of(SERVICE, namespace, key.name))
