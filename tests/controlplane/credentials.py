"""Keys, tokens and kubeconfig files of one test control plane, made with the standard library alone.

The API server makes its own TLS certificate. Users are known by bearer tokens, a new one each run.
"""

import base64
import csv
import json
import secrets
from pathlib import Path

P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
ADMIN = "admin"
OPERATOR = "operator"
CONTROLLERS = "system:kube-controller-manager"


def write_signing_key(path: Path) -> None:
    """Write an ECDSA P-256 private key that signs ServiceAccount tokens (RFC 5915, without the optional public key)."""
    scalar = (1 + secrets.randbelow(P256_ORDER - 1)).to_bytes(32, "big")
    version, curve = bytes.fromhex("020101"), bytes.fromhex("a00a06082a8648ce3d030107")
    body = version + b"\x04\x20" + scalar + curve
    pem = base64.encodebytes(b"\x30" + bytes([len(body)]) + body).decode()
    path.write_text(f"-----BEGIN EC PRIVATE KEY-----\n{pem}-----END EC PRIVATE KEY-----\n")


def write_tokens(path: Path) -> dict[str, str]:
    """Write the API server's token file, every user an administrator, and return each user's token."""
    tokens = {user: secrets.token_hex(16) for user in (ADMIN, OPERATOR, CONTROLLERS)}
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([token, user, user, "system:masters"] for user, token in tokens.items())
    return tokens


def write_kubeconfig(path: Path, url: str, certificate: Path, user: str, token: str) -> None:
    cluster = {"server": url, "certificate-authority": str(certificate)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": "default"}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(config))  # JSON is YAML
