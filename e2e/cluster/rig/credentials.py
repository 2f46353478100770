"""Keys, tokens and kubeconfig files of one cluster. Users are known by bearer tokens, new ones each time."""

import csv
import json
import secrets
from pathlib import Path

from e2e.cluster.rig.api import OUTSIDE
from e2e.cluster.rig.layout import API_CERTIFICATE, CREDENTIALS, KUBECONFIG, Node
from tests.controlplane.credentials import write_signing_key

PROGRAMS = ("kube-controller-manager", "kube-scheduler", "kube-proxy")


def write_credentials(members: list[Node], inside: str) -> None:
    """`inside` is the API server's URL for whoever is in the cluster."""
    CREDENTIALS.mkdir(parents=True, mode=0o700)
    write_signing_key(CREDENTIALS / "signing.key")
    users = [(f"system:{name}", "", CREDENTIALS / f"{name}.kubeconfig") for name in PROGRAMS]
    users += [(f"system:node:{node.name}", "system:nodes", node.kubeconfig) for node in members]
    users.append(("admin", "system:masters", KUBECONFIG))
    users.append(("prometheus", "system:masters", CREDENTIALS / "prometheus.kubeconfig"))
    rows = []
    for user, group, path in users:
        token = secrets.token_hex(16)
        rows.append([token, user, user, *([group] if group else [])])
        _write_kubeconfig(path, user, token, inside)
    with (CREDENTIALS / "tokens.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def _write_kubeconfig(path: Path, user: str, token: str, inside: str) -> None:
    """The API server's certificate names its own address and `kubernetes`, not the relay's."""
    outside = {"server": OUTSIDE, "tls-server-name": "kubernetes"}
    cluster = outside if path == KUBECONFIG else {"server": inside}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": {**cluster, "certificate-authority": str(API_CERTIFICATE)}}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": user}}],
        "current-context": "e2e",
    }
    path.write_text(json.dumps(config))  # JSON is YAML
    path.chmod(0o600)
