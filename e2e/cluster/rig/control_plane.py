"""The cluster's PID 1: the network between nodes, etcd, the API server and its controllers, and the nodes themselves.

python -m rig.control_plane PROGRAMS NUM_NODES      (inside the namespaces that `up` makes)
"""

import sys
import urllib.error
import urllib.request
from pathlib import Path
from ssl import CERT_NONE, SSLContext, create_default_context

from rig.layout import API_PORT, CONTROL_PLANE_ADDRESS, CREDENTIALS, HOME, PODS, SERVICES, Node, nodes
from rig.processes import reap_until_one_ends, run, start, wait_until
from tests.controlplane.programs import ETCD_PORT, etcd_command

ETCD = f"http://{CONTROL_PLANE_ADDRESS}:{ETCD_PORT}"
API_URL = f"https://{CONTROL_PLANE_ADDRESS}:{API_PORT}"
SIGNING_KEY, API_CERTIFICATE = CREDENTIALS / "signing.key", CREDENTIALS / "tls" / "apiserver.crt"


def main() -> None:
    programs, members = Path(sys.argv[1]), nodes(int(sys.argv[2]))
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    join_network(members)
    running = {"etcd": start("etcd", etcd_command(programs, HOME, CONTROL_PLANE_ADDRESS))}
    running["kube-apiserver"] = start("kube-apiserver", api_server(programs))
    wait_until(is_api_ready, 90, "the API server to be ready")
    running["kube-controller-manager"] = start("kube-controller-manager", controllers(programs))
    running["kube-scheduler"] = start("kube-scheduler", scheduler(programs))
    for node in members:
        running[node.name] = start(node.name, node_command(programs, node, len(members)))
    reap_until_one_ends(running)


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


def node_command(programs: Path, node: Node, num_nodes: int) -> list[str]:
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    module = [sys.executable, "-m", "rig.node", str(programs), str(node.number), str(num_nodes)]
    return ["nsenter", f"--net=/run/netns/{node.name}", *unshare, *module]


def is_api_ready() -> bool:
    context: SSLContext = create_default_context()
    context.check_hostname, context.verify_mode = False, CERT_NONE
    try:
        with urllib.request.urlopen(f"{API_URL}/readyz", timeout=2, context=context) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    main()
