"""The cluster's PID 1: the network between nodes, etcd, the API server and its controllers, and the nodes themselves.

python -m e2e.cluster.rig.control_plane FAMILY PROGRAMS NUM_NODES TEMPLATE [PROMETHEUS]
(inside the namespaces that `up` makes)
"""

import sys
from pathlib import Path

from e2e.cluster.rig import prometheus
from e2e.cluster.rig.api import is_ready
from e2e.cluster.rig.cgroups import enter_own_cgroup
from e2e.cluster.rig.layout import (
    API_CERTIFICATE,
    API_PORT,
    CREDENTIALS,
    HOME,
    Node,
    nodes,
)
from e2e.cluster.rig.network import NETWORKS, Network, in_url
from e2e.cluster.rig.processes import Programs, run, wait_until
from tests.controlplane.programs import ETCD_PORT, etcd_command

SIGNING_KEY = CREDENTIALS / "signing.key"
LOST_AFTER_SECONDS, EVICTED_AFTER_SECONDS = 16, 5
"""A node that is not heard of for so long is lost, and its pods are replaced so much later; elsewhere 50 and 300 s."""


def main() -> None:
    network, programs = NETWORKS[sys.argv[1]], Path(sys.argv[2])
    members, template = nodes(int(sys.argv[3])), sys.argv[4]
    enter_own_cgroup()
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    mount_read_only(template)
    join_network(members, network)
    running = Programs()
    running.start("etcd", etcd_command(programs, HOME, in_url(network.control_plane)))
    running.start("kube-apiserver", api_server(programs, network))
    wait_until(lambda: is_ready(network.api_server), 90, "the API server to be ready")
    running.start("kube-controller-manager", controllers(programs, network))
    running.start("kube-scheduler", scheduler(programs))
    for node in members:
        running.start(node.name, node_command(programs, node, len(members), template, network))
    for program in sys.argv[5:]:
        start_prometheus(running, Path(program), network)
    running.watch()


def mount_read_only(folder: str) -> None:
    """For everyone in the cluster; others on this machine see it as it is."""
    run("mount", "--bind", folder, folder)
    run("mount", "-o", "remount,bind,ro", folder)


def start_prometheus(running: Programs, program: Path, network: Network) -> None:
    prometheus.write_files(prometheus.files([], []))
    running.start("prometheus", prometheus.prometheus_command(program, network))
    running.start("prometheus-files", [sys.executable, "-m", prometheus.__name__, network.family])


def join_network(members: list[Node], network: Network) -> None:
    """A bridge with the control plane's address, a network namespace for each node, and a route to its pods."""
    Path("/run/netns").mkdir()
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "kvasir0", "type", "bridge")
    own = f"{network.control_plane}/{network.prefix_length}"
    run("ip", "address", "add", own, "dev", "kvasir0", *network.address_options)
    run("ip", "link", "set", "kvasir0", "up")
    for node in members:
        run("ip", "netns", "add", node.name)
        run("ip", "link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", node.name)
        run("ip", "link", "set", node.name, "master", "kvasir0", "up")
        run("ip", "route", "add", network.pods_of(node), "via", network.node(node))


def api_server(programs: Path, network: Network) -> list[str]:
    return [
        str(programs / "kube-apiserver"),
        f"--etcd-servers=http://{in_url(network.control_plane)}:{ETCD_PORT}",
        f"--bind-address={network.control_plane}",
        f"--secure-port={API_PORT}",
        f"--cert-dir={CREDENTIALS / 'tls'}",
        f"--token-auth-file={CREDENTIALS / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--default-not-ready-toleration-seconds={EVICTED_AFTER_SECONDS}",
        f"--default-unreachable-toleration-seconds={EVICTED_AFTER_SECONDS}",
        f"--advertise-address={network.control_plane}",
        f"--service-cluster-ip-range={network.services}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={SIGNING_KEY}",
        f"--service-account-signing-key-file={SIGNING_KEY}",
        "--allow-privileged",
        "--enable-aggregator-routing",  # kube-proxy is on nodes only: a webhook's Service is dialled by its pods
        "--kubelet-preferred-address-types=InternalIP",
    ]


def controllers(programs: Path, network: Network) -> list[str]:
    return [
        str(programs / "kube-controller-manager"),
        f"--kubeconfig={CREDENTIALS / 'kube-controller-manager.kubeconfig'}",
        f"--service-account-private-key-file={SIGNING_KEY}",
        f"--root-ca-file={API_CERTIFICATE}",
        "--use-service-account-credentials",  # each controller with its own rights, as RBAC wants them
        f"--cluster-cidr={network.pods}",
        f"--node-monitor-grace-period={LOST_AFTER_SECONDS}s",
        "--kube-api-qps=500",  # the default of 20 delays the first ServiceAccount by 5 s
        "--kube-api-burst=1000",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def scheduler(programs: Path) -> list[str]:
    kubeconfig = CREDENTIALS / "kube-scheduler.kubeconfig"
    return [
        str(programs / "kube-scheduler"),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def node_command(programs: Path, node: Node, num_nodes: int, template: str, network: Network) -> list[str]:
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    module = [sys.executable, "-m", "e2e.cluster.rig.node", network.family, str(programs)]
    arguments = [str(node.number), str(num_nodes), template]
    return ["nsenter", f"--net=/run/netns/{node.name}", *unshare, *module, *arguments]


if __name__ == "__main__":
    main()
