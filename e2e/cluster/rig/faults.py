"""What goes wrong in clusters, done to the rig's: a process killed or frozen, a node lost, the API server away.

Nodes are named as pods name them (`spec.nodeName`), pods by their uid. Each fault has a counterpart that undoes it.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.rig.api import OUTSIDE, is_ready
from e2e.cluster.rig.cgroups import hierarchies
from e2e.cluster.rig.layout import CGROUP, HELD, HOME, PID_FILE, RUNNING
from tests.controlplane.processes import wait_until

NEEDS_API_SERVER = ("kube-scheduler", "kube-controller-manager")
"""They lose their Lease with the API server and end themselves, in clusters that have them replicated."""

_ESTABLISHED = "01"
"""In /proc/PID/net/tcp."""


class FaultError(Exception):
    """There is nothing of that name to break."""


def host_pids(pod_uid: str, container: str | None = None) -> list[int]:
    """This machine's numbers of the processes of a pod's container, or of all of them; none once they have ended."""
    names = _container_names()
    wanted = set(names.values()) if container is None else {container}
    groups = [group for group in _pod_cgroups(pod_uid) if names.get(group.name) in wanted]
    return sorted(pid for group in groups for pid in _processes(group))


def signal_processes(pod_uid: str, container: str, number: signal.Signals) -> None:
    """To all of a container's."""
    for pid in host_pids(pod_uid, container):
        os.kill(pid, number)


def _processes(cgroup: Path) -> list[int]:
    try:
        return [int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()]
    except OSError:  # the container has just ended
        return []


def _container_names() -> dict[str, str]:
    """By container id, off the kubelets' links POD_NAMESPACE_CONTAINER-ID.log; those that hold namespaces have none."""
    links = [path.stem.rpartition("-") for path in HOME.glob("node-*/containers/*.log")]
    return {container_id: names.rpartition("_")[2] for names, _, container_id in links}


def _pod_cgroups(pod_uid: str) -> list[Path]:
    """One for each container, the one that holds the namespaces included; all hierarchies have the same."""
    for hierarchy in hierarchies():
        for below in ("", "*/"):  # pods whose requests equal their limits are in no class of their own
            if found := list((hierarchy / CGROUP).glob(f"node-*/kubepods/{below}pod{pod_uid}/*/")):
                return found
    return []


def stop(program: str) -> None:
    """Kill a program of the control plane, e.g. `prometheus`, and keep it away; returns when it has ended."""
    if not (RUNNING / program).exists():
        raise FaultError(f"no program {program} runs, only {', '.join(sorted(os.listdir(RUNNING)))}: name one of these")
    (HELD / program).touch()
    wait_until(lambda: not (RUNNING / program).exists(), 10, f"{program} to end")


def start(program: str) -> None:
    """Let a stopped program come back; returns when its process has started."""
    (HELD / program).unlink(missing_ok=True)
    wait_until((RUNNING / program).exists, 10, f"{program} to start")


@contextmanager
def api_server_stopped() -> Iterator[None]:
    """Connections to it are refused meanwhile; ready again afterwards."""
    try:
        for program in (*NEEDS_API_SERVER, "kube-apiserver"):
            stop(program)
        yield
    finally:
        start("kube-apiserver")
        wait_until(lambda: is_ready(OUTSIDE), 90, "the API server to be ready again")
        for program in NEEDS_API_SERVER:
            start(program)


def stop_kubelet(node: str) -> None:
    """Freeze it: one that was started anew would take back the accelerators that exist on paper."""
    os.kill(_kubelet_pid(node), signal.SIGSTOP)


def start_kubelet(node: str) -> None:
    os.kill(_kubelet_pid(node), signal.SIGCONT)


def _kubelet_pid(node: str) -> int:
    own = f"--hostname-override={node}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            program, *arguments = (process / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if program.endswith(b"/kubelet") and own in arguments:
            return int(process.name)
    raise FaultError(f"no kubelet of {node} runs: name a node that `kubectl get nodes` shows")


def cut_network(node: str) -> None:
    """Pull its plug: nothing comes in or out any more, and no connection is told."""
    _set_link(node, "down")


def restore_network(node: str) -> None:
    _set_link(node, "up")


def _set_link(node: str, state: str) -> None:
    link = ["ip", "link", "set", "dev", node, state]
    enter = ["nsenter", f"--target={PID_FILE.read_text()}", "--net"]
    done = subprocess.run([*enter, *link], capture_output=True, text=True)
    if done.returncode != 0:
        raise FaultError(f"the plug of {node} cannot be set {state}: {done.stderr.strip()}")


@contextmanager
def connections_silenced(pod_uid: str, container: str, port: int) -> Iterator[None]:
    """What the open connections of a pod to a port send or get is lost, and neither side is told; new ones work."""
    pid = host_pids(pod_uid, container)[0]
    own = [local for local, remote in _established(pid) if remote == port]
    if not own:
        raise FaultError(f"pod {pod_uid} has no open connection to port {port}")
    rules = [("OUTPUT", "--sport", str(each)) for each in own] + [("INPUT", "--dport", str(each)) for each in own]
    enter = ["nsenter", f"--target={pid}", "--net", "iptables"]
    for chain, *match in rules:
        subprocess.run([*enter, "--append", chain, "--protocol", "tcp", *match, "--jump", "DROP"], check=True)
    try:
        yield
    finally:
        for chain, *match in rules:
            subprocess.run([*enter, "--delete", chain, "--protocol", "tcp", *match, "--jump", "DROP"], check=True)


def _established(pid: int) -> list[tuple[int, int]]:
    """Local and remote ports of the TCP connections in a process's network."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    ports = [(fields[1], fields[2]) for fields in lines if fields[3] == _ESTABLISHED]
    return [(int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)) for local, remote in ports]


@contextmanager
def node_lost(node: str) -> Iterator[None]:
    """Its pods and its kubelet run on, but nobody hears of them; back on the network afterwards."""
    stop_kubelet(node)
    cut_network(node)
    try:
        yield
    finally:
        restore_network(node)
        start_kubelet(node)
