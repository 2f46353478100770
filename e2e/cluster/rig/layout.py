"""Where a cluster's parts lie and how they are addressed: what `up`, `down` and the cluster's own processes agree on.

The cluster lives in namespaces of its own (mount, network, process, IPC and host name). Its network is a bridge that
joins the control plane and the nodes and leads nowhere else.
"""

import os
from dataclasses import dataclass
from pathlib import Path

HOME = Path(os.environ.get("KVASIR_E2E_HOME", "/var/lib/kvasir-e2e"))
"""Everything that the cluster writes; `down` removes it."""
LOGS, CREDENTIALS, CONTAINERD_ROOTS = HOME / "logs", HOME / "credentials", HOME / "containerd"
PID_FILE, RELAY_PID_FILE = HOME / "pid", HOME / "relay.pid"
SYSCTLS, MADE = HOME / "sysctls.json", HOME / "made.json"
"""What `down` puts back, and the mount points that it takes away because `up` found them missing."""
MOUNT_POINTS = ("/var/lib/cni", "/var/lib/kubelet", "/var/log/containers", "/var/log/pods")
"""The few paths that containers' tools will not have moved; every node has folders of its own under them."""
KUBECONFIG = HOME / "kubeconfig"
IMAGES = HOME / "images"
"""OCI archives that every node imports when it starts."""

CGROUP = "kvasir-e2e"
CONTROL_PLANE_ADDRESS, API_PORT = "10.199.0.1", 6443
RELAY_ADDRESS = "127.199.0.1"
SERVICES, PODS = "10.96.0.0/16", "10.244.0.0/16"
DNS_ADDRESS = "10.96.0.10"
PAUSE_IMAGE = "kvasir.dev/pause:1"
FAKE_GPUS = 8


@dataclass(frozen=True)
class Node:
    """One kubelet with its containerd. `number` counts from 1."""

    number: int

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return f"10.199.0.{10 + self.number}"

    @property
    def pods(self) -> str:
        return f"10.244.{self.number}.0/24"

    @property
    def home(self) -> Path:
        return HOME / self.name

    @property
    def kubeconfig(self) -> Path:
        return CREDENTIALS / f"{self.name}.kubeconfig"


def nodes(count: int) -> list[Node]:
    return [Node(number) for number in range(1, count + 1)]


def cgroup_parents() -> list[Path]:
    """The mounted hierarchies: one of version 2, or one for each controller of version 1."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    return [path for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink()]
