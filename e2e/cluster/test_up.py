"""The cluster itself: three real nodes whose pods run, find each other and are scheduled by accelerators."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests.controlplane.processes import wait_until

HERE = Path(__file__).parent
HOME = Path("/var/lib/kvasir-e2e")
MOUNT_POINTS = [Path(path) for path in ("/var/lib/cni", "/var/lib/kubelet", "/var/log/containers", "/var/log/pods")]
WERE_THERE = [path.exists() for path in MOUNT_POINTS]
HELLO = "kvasir.dev/hello:1"
HELLO_SOURCE = """
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void end(int signal) { exit(0); }

// hello: serve this pod's name on port 8080.   hello ADDRESS PORT: print what is served there.
int main(int argc, char **argv) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(8080)};
    char text[512], name[128];
    int one = 1, connection = socket(AF_INET, SOCK_STREAM, 0);
    signal(SIGTERM, end);
    if (argc == 3) {
        at.sin_port = htons(atoi(argv[2]));
        inet_pton(AF_INET, argv[1], &at.sin_addr);
        if (connect(connection, (struct sockaddr *)&at, sizeof at)) return perror("connect"), 1;
        ssize_t got = read(connection, text, sizeof text);
        return fwrite(text, 1, got > 0 ? got : 0, stdout) == 0;
    }
    gethostname(name, sizeof name);
    int length = snprintf(text, sizeof text, "HTTP/1.0 200 OK\\r\\nContent-Length: %zu\\r\\n\\r\\n%s",
                          strlen(name), name);
    setsockopt(connection, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    bind(connection, (struct sockaddr *)&at, sizeof at);
    listen(connection, 16);
    for (;;) {
        int client = accept(connection, NULL, NULL);
        if (write(client, text, length) < 0) perror("write");
        close(client);
    }
}
"""


def deployment(name: str, replicas: int, resources: dict[str, str] | None = None) -> dict[str, object]:
    labels = {"app": name}
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    container = {
        "name": "hello",
        "image": HELLO,
        "resources": {"limits": resources or {}},
        "readinessProbe": {"httpGet": {"port": 8080}, "periodSeconds": 1},
    }
    pod = {
        "containers": [container],
        "terminationGracePeriodSeconds": 1,
        "topologySpreadConstraints": [] if resources else [{**spread, "labelSelector": {"matchLabels": labels}}],
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def service(name: str) -> dict[str, object]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


class Cluster:
    """What `up` printed, and kubectl with it."""

    def __init__(self, printed: str) -> None:
        exports = dict(line.removeprefix("export ").split("=", 1) for line in printed.splitlines() if "export " in line)
        self._programs = exports["PATH"].removesuffix(":$PATH")
        self._environment = os.environ | {"KUBECONFIG": exports["KUBECONFIG"]}

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        command = [f"{self._programs}/kubectl", *arguments]
        done = subprocess.run(command, input=text, env=self._environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def apply(self, *objects: dict[str, object]) -> None:
        self.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(objects))

    def items(self, kind: str, selector: str = "") -> list[dict]:
        return json.loads(self.kubectl("get", kind, "-o", "json", f"--selector={selector}"))["items"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    sys.path.insert(0, str(HERE))
    from rig.pause import write_program_image

    HOME.joinpath("images").mkdir(parents=True, exist_ok=True)
    write_program_image(HOME / "images" / "hello.tar", HELLO, HELLO_SOURCE)
    up = subprocess.run([str(HERE / "up")], stdout=subprocess.PIPE, text=True, timeout=1800)
    try:
        assert up.returncode == 0, up.stdout
        yield Cluster(up.stdout)
    finally:
        subprocess.run([str(HERE / "down")], check=True, timeout=120)


def ready(cluster: Cluster, name: str, count: int) -> Callable[[], list[dict]]:
    def pods() -> list[dict]:
        found = [
            pod
            for pod in cluster.items("pods", f"app={name}")
            if any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))
        ]
        return found if len(found) >= count else []

    return pods


def test_pods_run_on_every_node_and_are_reached_through_their_service(cluster: Cluster) -> None:
    cluster.apply(deployment("hello", 3), service("hello"))
    pods = wait_until(ready(cluster, "hello", 3), 60, "three pods to be ready")
    assert {pod["spec"]["nodeName"] for pod in pods} == {"node-1", "node-2", "node-3"}
    names = {pod["metadata"]["name"] for pod in pods}
    address = cluster.items("services", "")
    [cluster_ip] = [each["spec"]["clusterIP"] for each in address if each["metadata"]["name"] == "hello"]
    for pod in pods:
        heard = set()
        for _ in range(20):
            answer = cluster.kubectl("exec", pod["metadata"]["name"], "--", "/program", cluster_ip, "80")
            heard.add(answer.splitlines()[-1])
        assert heard <= names
        assert len(heard) > 1


def test_accelerators_that_exist_on_paper_decide_where_pods_go(cluster: Cluster) -> None:
    cluster.apply(deployment("gpu", 4, {"nvidia.com/gpu": "8"}))
    pods = wait_until(ready(cluster, "gpu", 3), 60, "three pods with all of a node's accelerators")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 3
    [left_over] = [pod for pod in cluster.items("pods", "app=gpu") if "nodeName" not in pod["spec"]]
    [condition] = [each for each in left_over["status"]["conditions"] if each["type"] == "PodScheduled"]
    assert "Insufficient nvidia.com/gpu" in condition["message"]


def test_a_pod_cannot_reach_the_machine(cluster: Cluster) -> None:
    routes = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout
    addresses = [line.split()[3].split("/")[0] for line in routes.splitlines() if " lo " not in line]
    [pod, *_] = wait_until(ready(cluster, "hello", 3), 60, "three pods to be ready")
    assert addresses
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        for address in addresses:
            socket.create_connection((address, port), timeout=5).close()  # it is there for others
            with pytest.raises(AssertionError, match=r"unreachable|No route|timed out"):
                cluster.kubectl("exec", pod["metadata"]["name"], "--", "/program", address, str(port))


def test_down_leaves_nothing_behind(cluster: Cluster) -> None:
    pid = int((HOME / "pid").read_text())
    subprocess.run([str(HERE / "down")], check=True, timeout=120)
    assert not HOME.exists()
    assert not list(Path("/sys/fs/cgroup").rglob("kvasir-e2e"))
    assert not Path(f"/proc/{pid}/root/etc").exists()
    assert "kvasir-e2e" not in Path("/proc/mounts").read_text()
    assert [path.exists() for path in MOUNT_POINTS] == WERE_THERE
