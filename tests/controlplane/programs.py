"""The control plane's programs: where they are, the flags that each is started with, and the address they share."""

import json
import random
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.controlplane.processes import ControlPlaneError

BUILD = Path(__file__).parents[2] / "e2e" / "cluster" / "build"
ETCD_PORT, ETCD_PEER_PORT, API_PORT = 2379, 2380, 6443
# What services, and the rights of who may see them, need of Kubernetes. All others only cost time; and
# node-lifecycle-controller would declare nodes dead, whose leases no kubelet renews, and evict their pods in a minute.
CONTROLLERS = (
    "clusterrole-aggregation-controller",
    "deployment-controller",
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "pod-garbage-collector-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "statefulset-controller",
)
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # Of ServiceAccounts reads too: which rights they use is a test's question.
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
    ],
}


@cache
def program_directory(*, has_nodes: bool = False) -> Path:
    """Where the programs are, with those of nodes or not; builds them the first time. Raises ControlPlaneError."""
    return built_by(BUILD, *(["--nodes"] if has_nodes else []))


def built_by(script: Path, *arguments: str) -> Path:
    """The directory that a build script names in its last line; what it prints before is passed on to stdout.

    Raises ControlPlaneError when the build fails, which has said why on stderr.
    """
    with subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True) as build:
        assert build.stdout is not None
        last = ""
        for line in build.stdout:
            if last:
                print(last, flush=True)
            last = line.strip()
    if build.returncode != 0:
        raise ControlPlaneError(f"{script} ended with status {build.returncode}: what it printed says why")
    return Path(last)


def unused_loopback_address() -> str:
    """A random address in 127.0.0.0/8 with the three ports free: no other run will have chosen it."""
    while True:
        address = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"
        if all(is_free(address, port) for port in (ETCD_PORT, ETCD_PEER_PORT, API_PORT)):
            return address


def is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def write_audit_policy(path: Path) -> None:
    path.write_text(json.dumps(AUDIT_POLICY))


def etcd_command(programs: Path, directory: Path, address: str) -> list[str]:
    clients, peers = f"http://{address}:{ETCD_PORT}", f"http://{address}:{ETCD_PEER_PORT}"
    return [
        str(programs / "etcd"),
        f"--data-dir={directory / 'etcd'}",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--unsafe-no-fsync",  # the data dies with the run
        "--log-level=warn",
    ]


def api_server_command(programs: Path, directory: Path, address: str) -> list[str]:
    key = directory / "signing.key"
    return [
        str(programs / "kube-apiserver"),
        f"--etcd-servers=http://{address}:{ETCD_PORT}",
        f"--bind-address={address}",
        f"--secure-port={API_PORT}",
        f"--cert-dir={directory / 'tls'}",
        f"--token-auth-file={directory / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",  # as OpenShift has it
        f"--advertise-address={address}",
        "--endpoint-reconciler-type=none",  # it would refuse a loopback address, once a second
        "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--audit-policy-file={directory / 'audit-policy.json'}",
        f"--audit-log-path={directory / 'audit.log'}",
        "--audit-log-mode=blocking",  # a write is in the log before its answer is sent
        "--allow-privileged",
    ]


def controllers_command(programs: Path, directory: Path, kubeconfig: Path) -> list[str]:
    return [
        str(programs / "kube-controller-manager"),
        f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={directory / 'signing.key'}",
        f"--root-ca-file={directory / 'tls' / 'apiserver.crt'}",
        f"--controllers={','.join(CONTROLLERS)}",
        "--kube-api-qps=500",  # the default of 20 delays the first ServiceAccount by 5 s
        "--kube-api-burst=1000",
        "--leader-elect=false",
        "--secure-port=0",
    ]
