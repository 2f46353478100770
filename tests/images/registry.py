"""A container registry on a loopback address, Debian's, and what it has by digest."""

import hashlib
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.rig.debian import registry_program
from tests.controlplane.processes import ServerProcess

ACCEPTED = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True)
class Registry:
    address: str

    def is_ready(self) -> bool:
        try:
            return self._get("/v2/") is not None
        except OSError:
            return False

    def manifest(self, repository: str, reference: str) -> tuple[str, dict[str, Any]]:
        """Its digest, and the manifest."""
        body = self._get(f"/v2/{repository}/manifests/{reference}")
        return digest_of(body), json.loads(body)

    def blob(self, repository: str, described: dict[str, Any]) -> bytes:
        body = self._get(f"/v2/{repository}/blobs/{described['digest']}")
        assert (len(body), digest_of(body)) == (described["size"], described["digest"])
        return body

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request("GET", path, headers={"Accept": ACCEPTED})
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, body
        return body


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@contextmanager
def running_registry(folder: Path) -> Iterator[Registry]:
    registry = Registry(f"127.0.0.1:{unused_port()}")
    config = {
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
        "http": {"addr": registry.address},
    }
    (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    process = ServerProcess([str(registry_program()), "serve", str(folder / "config.yml")], folder / "log")
    try:
        process.wait_until(registry.is_ready, 30, "a registry to answer")
        yield registry
    finally:
        process.kill()


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
