"""containerd as a node and as the maker of the images' template run it."""

import subprocess
from pathlib import Path

from e2e.cluster.rig.layout import PAUSE_IMAGE, REGISTRIES
from e2e.cluster.rig.processes import run

SOCKET = "/run/containerd/containerd.sock"
CNI_PROGRAMS = "/usr/lib/cni"


def base_config(root: Path) -> str:
    return f"""version = 2
root = "{root}"
state = "/run/containerd"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
"""


def importer_config(root: Path) -> str:
    """Without Kubernetes' part, which gives images names of its own."""
    return 'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n' + base_config(root)


def node_config(root: Path, network: Path) -> str:
    return f"""{base_config(root)}
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{REGISTRIES}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = "{network}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


def is_up() -> bool:
    return subprocess.run(["ctr", "--address", SOCKET, "version"], capture_output=True).returncode == 0


def ctr(*arguments: str) -> str:
    """In the namespace that kubelets look into."""
    return run("ctr", "--address", SOCKET, "--namespace", "k8s.io", *arguments)
