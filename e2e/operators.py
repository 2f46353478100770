"""The operator that leads through a fault. Each strike returns when another one leads."""

import signal
from collections.abc import Callable

from e2e.cluster.rig.faults import signal_processes
from e2e.live_cluster import POLL_SECONDS, SYSTEM, LiveCluster, uid_of
from tests.controlplane.processes import wait_until

NAME = "kvasir-operator"
StrikeTheLeader = Callable[[LiveCluster], None]


def kill_the_leader(cluster: LiveCluster) -> None:
    leader = leader_of(cluster)
    signal_operator(cluster, leader, signal.SIGKILL)
    wait_another_leads(cluster, leader)


def stop_the_leader(cluster: LiveCluster) -> None:
    """By SIGSTOP; it goes on when another leads, and has yet to learn that."""
    leader = leader_of(cluster)
    signal_operator(cluster, leader, signal.SIGSTOP)
    wait_another_leads(cluster, leader)
    signal_operator(cluster, leader, signal.SIGCONT)


def drain_the_leader(cluster: LiveCluster) -> None:
    """Deletes its pod as a node's drain does."""
    leader = leader_of(cluster)
    cluster.kubectl("delete", "pod", pod_of(leader), f"--namespace={SYSTEM}", "--wait=false")
    wait_another_leads(cluster, leader)


def delete_the_leader(cluster: LiveCluster) -> None:
    """Without grace."""
    leader = leader_of(cluster)
    cluster.kubectl("delete", "pod", pod_of(leader), f"--namespace={SYSTEM}", "--force", "--grace-period=0")
    wait_another_leads(cluster, leader)


def wait_standby(cluster: LiveCluster) -> None:
    """Until all operators are ready again: a kubelet lets one that was killed before wait."""
    cluster.kubectl("rollout", "status", f"deployment/{NAME}", f"--namespace={SYSTEM}", "--timeout=100s")


def wait_another_leads(cluster: LiveCluster, leader: str) -> None:
    wait_until(lambda: leader_of(cluster) not in ("", leader), 60, "another operator to lead", POLL_SECONDS)


def leader_of(cluster: LiveCluster) -> str:
    """NAMESPACE/POD_RANDOM, new with each start of an operator; empty while none leads."""
    lease = cluster.get("lease", NAME, SYSTEM)
    assert lease is not None, f"no Lease {NAME} in {SYSTEM}"
    return str(lease["spec"]["holderIdentity"])


def pod_of(leader: str) -> str:
    return leader.partition("/")[2].partition("_")[0]


def signal_operator(cluster: LiveCluster, leader: str, number: signal.Signals) -> None:
    found = cluster.get("pod", pod_of(leader), SYSTEM)
    assert found is not None, f"the Lease is held by {pod_of(leader)}, which does not exist"
    signal_processes(uid_of(found), "operator", number)
