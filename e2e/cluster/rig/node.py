"""A node's PID 1: its mounts, its end of the network, containerd, kubelet and kube-proxy.

python -m e2e.cluster.rig.node FAMILY PROGRAMS NUMBER NUM_NODES TEMPLATE
(inside the namespaces that the control plane makes)
"""

import json
import os
import socket
import sys
from pathlib import Path

from e2e.cluster.rig import containerd
from e2e.cluster.rig.cgroups import make_node_cgroups
from e2e.cluster.rig.layout import (
    CGROUP,
    CONTAINERD_ROOTS,
    CREDENTIALS,
    MODELS,
    MODELS_IN_NODES,
    MOUNT_POINTS,
    Node,
    nodes,
)
from e2e.cluster.rig.network import NETWORKS, Network
from e2e.cluster.rig.processes import Programs, run, wait_until, write
from e2e.cluster.rig.template import link_root

FORWARDING = {4: "/proc/sys/net/ipv4/ip_forward", 6: "/proc/sys/net/ipv6/conf/all/forwarding"}
LEASE_SECONDS = 16
"""It is renewed every 4 s, so that a node must be silent for a while before the controllers hold it for lost."""


def main() -> None:
    network, programs, node = NETWORKS[sys.argv[1]], Path(sys.argv[2]), Node(int(sys.argv[3]))
    socket.sethostname(node.name)
    mount(node)
    join_network(network, node, [other for other in nodes(int(sys.argv[4])) if other != node])
    make_node_cgroups(node.name)
    running = Programs()
    start_containerd(running, network, node, Path(sys.argv[5]))
    running.start(f"{node.name}-kubelet", kubelet(programs, network, node))
    running.start(f"{node.name}-kube-proxy", kube_proxy(programs, network, node))
    running.watch()


def mount(node: Node) -> None:
    """Own /run, own folders under MOUNT_POINTS, and the example models."""
    run("mount", "--make-rshared", "/")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    for path in MOUNT_POINTS:
        own = node.home / Path(path).name
        own.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", str(own), path)
    run("mount", "--make-rshared", "/var/lib/kubelet")
    run("mount", "--bind", str(MODELS), MODELS_IN_NODES)


def join_network(network: Network, node: Node, others: list[Node]) -> None:
    run("ip", "link", "set", "lo", "up")
    own = f"{network.node(node)}/{network.prefix_length}"
    run("ip", "address", "add", own, "dev", "eth0", *network.address_options)
    run("ip", "link", "set", "eth0", "up")
    # So that the node itself can dial what kube-proxy redirects.
    run("ip", "route", "add", network.services, "dev", "eth0")
    for other in others:
        run("ip", "route", "add", network.pods_of(other), "via", network.node(other))
    Path(FORWARDING[network.version]).write_text("1")


def pod_network(network: Network, node: Node) -> Path:
    """The folder that holds it."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": network.pods_of(node)}]],
            "routes": [{"dst": network.every_host}],
        },
    }
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    config = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
    return write(node.home / "cni-config" / "10-pods.conflist", json.dumps(config)).parent


def start_containerd(running: Programs, network: Network, node: Node, template: Path) -> None:
    root = CONTAINERD_ROOTS / node.name
    link_root(template, root)
    config = write(node.home / "containerd.toml", containerd.node_config(root, pod_network(network, node)))
    running.start(f"{node.name}-containerd", ["containerd", "--config", str(config)])
    wait_until(containerd.is_up, 30, f"containerd of {node.name}")


def kubelet(programs: Path, network: Network, node: Node) -> list[str]:
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": network.every_address,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}/{node.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{containerd.SOCKET}",
        "clusterDNS": [network.dns],
        "clusterDomain": "cluster.local",
        "resolvConf": str(write(node.home / "resolv.conf", "")),
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},  # nobody but the cluster's own can reach its network
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        # An image that somebody also pulled from a registry is still there under the name that it came with.
        "imagePullCredentialsVerificationPolicy": "NeverVerify",
        "nodeStatusUpdateFrequency": "5s",
        "nodeLeaseDurationSeconds": LEASE_SECONDS,
        "registerWithTaints": [],
    }
    return [
        str(programs / "kubelet"),
        f"--config={write(node.home / 'kubelet.json', json.dumps(config))}",
        f"--kubeconfig={node.kubeconfig}",
        f"--hostname-override={node.name}",
        f"--node-ip={network.node(node)}",
    ]


def kube_proxy(programs: Path, network: Network, node: Node) -> list[str]:
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(CREDENTIALS / "kube-proxy.kubeconfig")},
        "hostnameOverride": node.name,
        "mode": "iptables",
        "bindAddress": network.every_address,
        "clusterCIDR": network.pods,
        # nf_conntrack_max is read-only in a network namespace
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    return [str(programs / "kube-proxy"), f"--config={write(node.home / 'kube-proxy.json', json.dumps(config))}"]


if __name__ == "__main__":
    os.environ["PATH"] = f"/usr/sbin:/sbin:{os.environ['PATH']}"
    main()
