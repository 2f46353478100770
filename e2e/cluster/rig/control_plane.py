"""The cluster's PID 1: the network between nodes, etcd, the API server and its controllers, and the nodes themselves.

python -m e2e.cluster.rig.control_plane PROGRAMS NUM_NODES TEMPLATE [PROMETHEUS]
(inside the namespaces that `up` makes)
"""

import sys
from pathlib import Path

from e2e.cluster.rig import prometheus
from e2e.cluster.rig.api import INSIDE, is_ready
from e2e.cluster.rig.cgroups import enter_own_cgroup
from e2e.cluster.rig.layout import (
    API_CERTIFICATE,
    API_PORT,
    CONTROL_PLANE_ADDRESS,
    CREDENTIALS,
    HOME,
    PODS,
    SERVICES,
    Node,
    nodes,
)
from e2e.cluster.rig.processes import Programs, run, wait_until
from tests.controlplane.programs import ETCD_PORT, etcd_command

ETCD = f"http://{CONTROL_PLANE_ADDRESS}:{ETCD_PORT}"
SIGNING_KEY = CREDENTIALS / "signing.key"
LOST_AFTER_SECONDS, EVICTED_AFTER_SECONDS = 16, 5
"""A node that is not heard of for so long is lost, and its pods are replaced so much later; elsewhere 50 and 300 s."""


def main() -> None:
    programs, members, template = Path(sys.argv[1]), nodes(int(sys.argv[2])), sys.argv[3]
    enter_own_cgroup()
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    mount_read_only(template)
    join_network(members)
    running = Programs()
    running.start("etcd", etcd_command(programs, HOME, CONTROL_PLANE_ADDRESS))
    running.start("kube-apiserver", api_server(programs))
    wait_until(lambda: is_ready(INSIDE), 90, "the API server to be ready")
    running.start("kube-controller-manager", controllers(programs))
    running.start("kube-scheduler", scheduler(programs))
    for node in members:
        running.start(node.name, node_command(programs, node, len(members), template))
    for program in sys.argv[4:]:
        start_prometheus(running, Path(program))
    running.watch()


def mount_read_only(folder: str) -> None:
    """For everyone in the cluster; others on this machine see it as it is."""
    run("mount", "--bind", folder, folder)
    run("mount", "-o", "remount,bind,ro", folder)


def start_prometheus(running: Programs, program: Path) -> None:
    prometheus.write_files(prometheus.files([], []))
    running.start("prometheus", prometheus.prometheus_command(program))
    running.start("prometheus-files", [sys.executable, "-m", prometheus.__name__])


def join_network(members: list[Node]) -> None:
    """A bridge with the control plane's address, a network namespace for each node, and a route to its pods."""
    Path("/run/netns").mkdir()
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "kvasir0", "type", "bridge")
    run("ip", "address", "add", f"{CONTROL_PLANE_ADDRESS}/24", "dev", "kvasir0")
    run("ip", "link", "set", "kvasir0", "up")
    for node in members:
        run("ip", "netns", "add", node.name)
        run("ip", "link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", node.name)
        run("ip", "link", "set", node.name, "master", "kvasir0", "up")
        run("ip", "route", "add", node.pods, "via", node.address)


def api_server(programs: Path) -> list[str]:
    return [
        str(programs / "kube-apiserver"),
        f"--etcd-servers={ETCD}",
        f"--bind-address={CONTROL_PLANE_ADDRESS}",
        f"--secure-port={API_PORT}",
        f"--cert-dir={CREDENTIALS / 'tls'}",
        f"--token-auth-file={CREDENTIALS / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--default-not-ready-toleration-seconds={EVICTED_AFTER_SECONDS}",
        f"--default-unreachable-toleration-seconds={EVICTED_AFTER_SECONDS}",
        f"--advertise-address={CONTROL_PLANE_ADDRESS}",
        f"--service-cluster-ip-range={SERVICES}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={SIGNING_KEY}",
        f"--service-account-signing-key-file={SIGNING_KEY}",
        "--allow-privileged",
        "--kubelet-preferred-address-types=InternalIP",
    ]


def controllers(programs: Path) -> list[str]:
    return [
        str(programs / "kube-controller-manager"),
        f"--kubeconfig={CREDENTIALS / 'kube-controller-manager.kubeconfig'}",
        f"--service-account-private-key-file={SIGNING_KEY}",
        f"--root-ca-file={API_CERTIFICATE}",
        "--use-service-account-credentials",  # each controller with its own rights, as RBAC wants them
        f"--cluster-cidr={PODS}",
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


def node_command(programs: Path, node: Node, num_nodes: int, template: str) -> list[str]:
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    module = [sys.executable, "-m", "e2e.cluster.rig.node", str(programs), str(node.number), str(num_nodes), template]
    return ["nsenter", f"--net=/run/netns/{node.name}", *unshare, *module]


if __name__ == "__main__":
    main()
