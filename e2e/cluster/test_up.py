"""The cluster itself: three real nodes whose pods run, find each other and are scheduled by accelerators."""

import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from e2e.cluster.conftest import HERE, Cluster
from e2e.cluster.hello import deployment, service
from e2e.cluster.rig.layout import HOME, MOUNT_POINTS, PID_FILE
from tests.controlplane.processes import wait_until

NODES = ("node-1", "node-2", "node-3")
WERE_THERE = [Path(path).exists() for path in MOUNT_POINTS]


def test_pods_run_on_every_node_and_are_reached_through_their_service(cluster: Cluster) -> None:
    cluster.apply(deployment("hello", 3), service("hello"))
    pods = wait_until(cluster.ready("hello", 3), 60, "three pods to be ready")
    assert {pod["spec"]["nodeName"] for pod in pods} == {"node-1", "node-2", "node-3"}
    names = {pod["metadata"]["name"] for pod in pods}
    [hello] = [each for each in cluster.items("services") if each["metadata"]["name"] == "hello"]
    for pod in pods:
        ask = partial(cluster.ask, pod, hello["spec"]["clusterIP"])
        wait_until(partial(is_answered, ask), 30, f"kube-proxy to know the Service on {pod['spec']['nodeName']}")
        heard = {ask() for _ in range(20)}
        assert heard <= names
        assert len(heard) > 1


def is_answered(ask: Callable[[], str]) -> bool:
    """Each node's kube-proxy learns of a new Service in its own time, on which its pods' readiness does not wait."""
    try:
        return bool(ask())
    except AssertionError:
        return False


def test_accelerators_that_exist_on_paper_decide_where_pods_go(cluster: Cluster) -> None:
    cluster.apply(deployment("gpu", 4, {"nvidia.com/gpu": "8"}))
    pods = wait_until(cluster.ready("gpu", 3), 60, "three pods with all of a node's accelerators")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 3
    [left_over] = [pod for pod in cluster.items("pods", "app=gpu") if "nodeName" not in pod["spec"]]
    [condition] = [each for each in left_over["status"]["conditions"] if each["type"] == "PodScheduled"]
    assert "Insufficient nvidia.com/gpu" in condition["message"]


@pytest.mark.parametrize("name", ["hello", "hello.default", "hello.default.svc.cluster.local"])
def test_a_pod_resolves_a_service_by_name(cluster: Cluster, name: str) -> None:
    [hello] = [each for each in cluster.items("services") if each["metadata"]["name"] == "hello"]
    for pod in wait_until(cluster.ready("hello", 3), 60, "three pods to be ready"):
        assert cluster.resolve(pod, name) == {hello["spec"]["clusterIP"]}


def test_a_headless_service_resolves_to_its_pods(cluster: Cluster) -> None:
    cluster.apply(service("headless", selects="hello", clusterIP="None"))
    pods = wait_until(cluster.ready("hello", 3), 60, "three pods to be ready")
    addresses = {pod["status"]["podIP"] for pod in pods}
    wait_until(lambda: cluster.resolve(pods[0], "headless") == addresses, 30, "the name to lead to all pods")


def test_a_name_outside_the_cluster_does_not_exist(cluster: Cluster) -> None:
    [pod, *_] = wait_until(cluster.ready("hello", 3), 60, "three pods to be ready")
    started = time.monotonic()
    assert cluster.resolve(pod, "kubernetes.io") == set()
    assert time.monotonic() - started < 5


def shared_layers(node: str) -> set[Path]:
    """Where a node's snapshots that are links lead to; those of its own containers are none."""
    snapshots = HOME.glob(f"containerd/{node}/*.overlayfs/snapshots/*")
    return {path.resolve() for path in snapshots if path.is_symlink()}


def test_nodes_share_one_unpacked_copy_of_every_image(cluster: Cluster) -> None:
    first, *others = [shared_layers(node) for node in NODES]
    assert first
    assert others == [first, first]


def test_nothing_in_the_cluster_can_write_to_the_shared_copy(cluster: Cluster) -> None:
    enter = ["nsenter", f"--target={PID_FILE.read_text()}", "--mount"]
    layers = shared_layers("node-1")
    assert layers
    for layer in layers:
        done = subprocess.run([*enter, "touch", f"{layer}/x"], capture_output=True, text=True)
        assert "Read-only file system" in done.stderr


def test_a_pod_cannot_reach_the_machine(cluster: Cluster) -> None:
    routes = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout
    addresses = [line.split()[3].split("/")[0] for line in routes.splitlines() if " lo " not in line]
    [pod, *_] = wait_until(cluster.ready("hello", 3), 60, "three pods to be ready")
    assert addresses
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        for address in addresses:
            socket.create_connection((address, port), timeout=5).close()  # it is there for others
            with pytest.raises(AssertionError, match=r"unreachable|No route|timed out"):
                cluster.ask(pod, address, port)


def test_down_leaves_nothing_behind(cluster: Cluster) -> None:
    pid = int(PID_FILE.read_text())
    subprocess.run([str(HERE / "down")], check=True, timeout=120)
    assert not HOME.exists()
    assert not list(Path("/sys/fs/cgroup").rglob("kvasir-e2e"))
    assert not Path(f"/proc/{pid}/root/etc").exists()
    assert "kvasir-e2e" not in Path("/proc/mounts").read_text()
    assert [Path(path).exists() for path in MOUNT_POINTS] == WERE_THERE
