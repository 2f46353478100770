"""Where a cluster's parts lie: what `up`, `down` and the cluster's own processes agree on.

The cluster lives in namespaces of its own (mount, network, process, IPC and host name). Its network is a bridge that
joins the control plane and the nodes and leads nowhere else.
"""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT_OF_TREE = Path(__file__).resolve().parents[3]
HOME = Path(os.environ.get("KVASIR_E2E_HOME", "/var/lib/kvasir-e2e"))
"""Everything that the cluster writes; `down` removes it."""
LOGS, CREDENTIALS, CONTAINERD_ROOTS = HOME / "logs", HOME / "credentials", HOME / "containerd"
PID_FILE, RELAY_PID_FILE = HOME / "pid", HOME / "relay.pid"
FOUND = HOME / "found.json"
"""What `down` puts back as `up` found it."""
HELD, RUNNING = HOME / "held", HOME / "running"
"""One empty file for each program that faults.py holds stopped, and one for each that runs."""
MOUNT_POINTS = ("/var/lib/cni", "/var/lib/kubelet", "/var/log/containers", "/var/log/pods")
"""The few paths that containers' tools will not have moved; every node has folders of its own under them."""
MODELS, MODELS_IN_NODES = HOME / "models", "/models"
"""A copy of the example models, and where every node has it: for `source: file:///models/...`."""
KUBECONFIG = HOME / "kubeconfig"
API_CERTIFICATE = CREDENTIALS / "tls" / "apiserver.crt"
IMAGES = HOME / "images"
"""OCI archives of this cluster alone; those of the cache's folder `images` are in every cluster."""
REGISTRIES = HOME / "registries"
"""HOST/hosts.toml says where nodes find a registry of this name: containerd reads it at each pull."""

CGROUP = "kvasir-e2e"
API_PORT, PROMETHEUS_PORT = 6443, 9090
RELAY_ADDRESS = "127.199.0.1"
PAUSE_IMAGE = "kvasir.dev/pause:1"
FAKE_ACCELERATORS = {"nvidia.com/gpu": 8, "example.com/fake": 8}
"""What every node advertises, by resource; it exists on paper only."""


@dataclass(frozen=True)
class Node:
    """One kubelet with its containerd. `number` counts from 1."""

    number: int

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def home(self) -> Path:
        return HOME / self.name

    @property
    def kubeconfig(self) -> Path:
        return CREDENTIALS / f"{self.name}.kubeconfig"


def nodes(count: int) -> list[Node]:
    return [Node(number) for number in range(1, count + 1)]
