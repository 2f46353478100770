"""A node's PID 1: its mounts, its end of the network, containerd, kubelet and kube-proxy.

python -m rig.node PROGRAMS NUMBER NUM_NODES      (inside the namespaces that the control plane makes)
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from rig.layout import (
    CGROUP,
    CONTAINERD_ROOTS,
    CREDENTIALS,
    DNS_ADDRESS,
    IMAGES,
    MOUNT_POINTS,
    PAUSE_IMAGE,
    PODS,
    SERVICES,
    Node,
    cgroup_parents,
    nodes,
)
from rig.processes import reap_until_one_ends, run, start, wait_until, write

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CNI_PROGRAMS = "/usr/lib/cni"


def main() -> None:
    programs, node = Path(sys.argv[1]), Node(int(sys.argv[2]))
    socket.sethostname(node.name)
    mount(node)
    join_network(node, [other for other in nodes(int(sys.argv[3])) if other != node])
    make_cgroups(node)
    running = {"containerd": start(f"{node.name}-containerd", ["containerd", "--config", containerd_config(node)])}
    wait_until(is_containerd_up, 30, f"containerd of {node.name}")
    for image in sorted(IMAGES.glob("*.tar")):
        import_image(image)
    running["kubelet"] = start(f"{node.name}-kubelet", kubelet(programs, node))
    running["kube-proxy"] = start(f"{node.name}-kube-proxy", kube_proxy(programs, node))
    reap_until_one_ends({f"{node.name}-{name}": process for name, process in running.items()})


def mount(node: Node) -> None:
    """Own /run, and own folders under MOUNT_POINTS."""
    run("mount", "--make-rshared", "/")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    for path in MOUNT_POINTS:
        own = node.home / Path(path).name
        own.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", str(own), path)
    run("mount", "--make-rshared", "/var/lib/kubelet")


def join_network(node: Node, others: list[Node]) -> None:
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    run("ip", "route", "add", SERVICES, "dev", "eth0")  # so that the node itself can dial what kube-proxy redirects
    for other in others:
        run("ip", "route", "add", other.pods, "via", other.address)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def make_cgroups(node: Node) -> None:
    for parent in cgroup_parents():
        (parent / CGROUP / node.name).mkdir(parents=True, exist_ok=True)
        for path in (parent / CGROUP, parent / CGROUP / node.name):
            for name in ("cpuset.cpus", "cpuset.mems"):  # empty in a new cpuset of version 1, which admits no process
                if (path / name).exists() and not (path / name).read_text().strip():
                    (path / name).write_text((path.parent / name).read_text())


def containerd_config(node: Node) -> str:
    root = CONTAINERD_ROOTS / node.name
    config = f"""version = 2
root = "{root}"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = "{node.home / "cni-config"}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": node.pods}]], "routes": [{"dst": "0.0.0.0/0"}]},
    }
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    network = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
    write(node.home / "cni-config" / "10-pods.conflist", json.dumps(network))
    return str(write(node.home / "containerd.toml", config))


def is_containerd_up() -> bool:
    return subprocess.run(["ctr", "--address", CONTAINERD_SOCKET, "version"], capture_output=True).returncode == 0


def import_image(archive: Path) -> None:
    run("ctr", "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", "images", "import", str(archive))


def kubelet(programs: Path, node: Node) -> list[str]:
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}/{node.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(write(node.home / "resolv.conf", "")),
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},  # nobody but the cluster's own can reach its network
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "5s",
        "registerWithTaints": [],
    }
    return [
        str(programs / "kubelet"),
        f"--config={write(node.home / 'kubelet.json', json.dumps(config))}",
        f"--kubeconfig={node.kubeconfig}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    ]


def kube_proxy(programs: Path, node: Node) -> list[str]:
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(CREDENTIALS / "kube-proxy.kubeconfig")},
        "hostnameOverride": node.name,
        "mode": "iptables",
        "clusterCIDR": PODS,
        # nf_conntrack_max is read-only in a network namespace
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    return [str(programs / "kube-proxy"), f"--config={write(node.home / 'kube-proxy.json', json.dumps(config))}"]


if __name__ == "__main__":
    os.environ["PATH"] = f"/usr/sbin:/sbin:{os.environ['PATH']}"
    main()
