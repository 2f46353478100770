"""What goes wrong on purpose is noticed by Kubernetes as in any cluster, and undone without a trace."""

import os
import signal
import subprocess
import time

import pytest
from e2e.cluster.conftest import Cluster, is_ready, is_terminating
from e2e.cluster.hello import deployment, service
from e2e.cluster.rig.faults import FaultError, api_server_stopped, host_pids, node_lost, stop
from tests.controlplane.processes import wait_until


@pytest.fixture
def pods(cluster: Cluster) -> list[dict]:
    cluster.apply(deployment("hello", 3), service("hello"))
    return wait_until(cluster.ready("hello", 3), 60, "three pods to be ready")


def is_node_ready(cluster: Cluster, name: str) -> bool:
    return any(is_ready(node) for node in cluster.items("nodes") if node["metadata"]["name"] == name)


def test_a_container_is_found_by_its_pod_and_its_name(pods: list[dict]) -> None:
    [pid] = host_pids(pods[0]["metadata"]["uid"], "hello")
    assert host_pids(pods[0]["metadata"]["uid"]) == [pid]
    assert host_pids(pods[0]["metadata"]["uid"], "another") == []
    command = subprocess.run(["ps", "-o", "args=", str(pid)], capture_output=True, text=True).stdout
    assert command.strip() == "/program"


def test_a_killed_container_is_started_again(cluster: Cluster, pods: list[dict]) -> None:
    uid = pods[0]["metadata"]["uid"]
    [pid] = host_pids(uid, "hello")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: num_restarts(cluster, uid) == 1, 30, "the container to be started again")
    wait_until(cluster.ready("hello", 3), 30, "all pods to be ready again")
    [another] = host_pids(uid, "hello")
    assert another != pid


def num_restarts(cluster: Cluster, uid: str) -> int:
    [pod] = [each for each in cluster.items("pods", "app=hello") if each["metadata"]["uid"] == uid]
    return pod["status"]["containerStatuses"][0]["restartCount"]


def test_pods_serve_on_while_the_api_server_is_stopped_and_it_comes_back(cluster: Cluster, pods: list[dict]) -> None:
    processes = [host_pids(pod["metadata"]["uid"]) for pod in pods]
    with api_server_stopped():
        with pytest.raises(AssertionError, match=r"refused|EOF|reset"):
            cluster.kubectl("get", "nodes")
        assert [host_pids(pod["metadata"]["uid"]) for pod in pods] == processes
    cluster.apply(deployment("hello", 4))
    wait_until(cluster.ready("hello", 4), 60, "a fourth pod to be ready")
    assert [host_pids(pod["metadata"]["uid"]) for pod in pods] == processes


def test_a_lost_node_is_noticed_and_its_pods_are_replaced_until_it_is_back(cluster: Cluster, pods: list[dict]) -> None:
    lost, uid = pods[0]["spec"]["nodeName"], pods[0]["metadata"]["uid"]
    started = time.monotonic()
    with node_lost(lost):
        wait_until(lambda: not is_node_ready(cluster, lost), 60, f"{lost} to be missed")
        noticed = time.monotonic() - started
        wait_until(lambda: is_evicted(cluster, uid), 60, "its pod to be evicted")
        print(f"missed after {noticed:.1f} s, its pods evicted after {time.monotonic() - started:.1f} s")
        assert host_pids(uid)  # nobody could tell it to end
    wait_until(lambda: is_node_ready(cluster, lost), 60, f"{lost} to be back")
    wait_until(lambda: not host_pids(uid), 60, "the evicted pod to end")
    wait_until(cluster.ready("hello", 3), 60, "three pods to be ready")


def is_evicted(cluster: Cluster, uid: str) -> bool:
    return all(is_terminating(pod) for pod in cluster.items("pods") if pod["metadata"]["uid"] == uid)


def test_a_program_that_does_not_run_cannot_be_stopped(cluster: Cluster) -> None:
    with pytest.raises(FaultError, match="kube-apiserver"):
        stop("kube-api-server")
