"""The objects around server.py: its pod, Service and certificate, and what makes the API server ask it."""

import base64
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveCluster, is_pod_ready
from e2e.traffic.traffic import USER_ID
from e2e.webhooks.server import PORT
from tests.controlplane.processes import wait_until

SERVER = Path(__file__).parent / "server.py"
NAME = "webhooks"


@dataclass(frozen=True)
class Asked:
    """One request that the API server sent to the webhook."""

    user: str
    operation: str
    kind: str
    name: str
    is_dry_run: bool


@dataclass(frozen=True)
class WebhookServer:
    """Made by `webhook_server`."""

    cluster: LiveCluster
    namespace: str
    ca_bundle: str

    def asked(self) -> list[Asked]:
        """All requests so far."""
        log = self.cluster.kubectl("logs", NAME, f"--namespace={self.namespace}")
        return [Asked(**json.loads(line)) for line in log.splitlines() if line.startswith("{")]

    @contextmanager
    def asked_first(self, kind: str, name: str, path: str, namespace: str, rules: list[KubeObject]) -> Iterator[None]:
        """Meanwhile nothing of `rules` is written in `namespace` before the webhook `name` has had its say.

        `kind`: Validating or Mutating. The rules must hold for Deployments.
        """
        webhook = {
            "name": name,
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Fail",
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "rules": rules,
            "clientConfig": {
                "service": {"name": NAME, "namespace": self.namespace, "path": path, "port": PORT},
                "caBundle": self.ca_bundle,
            },
        }
        configuration = f"{kind}WebhookConfiguration"
        metadata = {"name": name}
        api_version = "admissionregistration.k8s.io/v1"
        self.cluster.apply(
            {"apiVersion": api_version, "kind": configuration, "metadata": metadata, "webhooks": [webhook]}
        )
        try:
            wait_until(lambda: self._is_asked(namespace), 30, f"the API server to ask {name}", POLL_SECONDS)
            yield
        finally:
            self.cluster.kubectl("delete", configuration, name)

    def _is_asked(self, namespace: str) -> bool:
        """The API server learns of a configuration in its own time: ask by a dry run until it does."""
        num_before = len(self.asked())
        probe = ("create", "deployment", "probe", "--image=nobody.example/probes:1", "--dry-run=server")
        subprocess.run(
            self.cluster.command(*probe, f"--namespace={namespace}"), env=self.cluster.environment, capture_output=True
        )
        return len(self.asked()) > num_before


def every_write_of(resource: str, group: str = "") -> KubeObject:
    """A webhook's rule."""
    return {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": [resource]}


DEPLOYMENTS, SERVICES = every_write_of("deployments", "apps"), every_write_of("services")


@contextmanager
def webhook_server(cluster: LiveCluster, image: str) -> Iterator[WebhookServer]:
    """Ready to be asked, in a namespace of its own. `image` has Python."""
    with cluster.namespace(NAME) as namespace:
        certificate, key = self_signed(f"{NAME}.{namespace}.svc")
        files = {"tls.crt": certificate, "tls.key": key, "server.py": SERVER.read_text()}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "stringData": files}
        cluster.apply(secret, service(), pod(image), namespace=namespace)
        wait_until(lambda: is_pod_ready(cluster.get("pod", NAME, namespace) or {"metadata": {}}), 60, "the webhook")
        yield WebhookServer(cluster, namespace, base64.b64encode(certificate.encode()).decode())


def self_signed(host: str, kind: str = "DNS") -> tuple[str, str]:
    """A certificate for one host, which is its own authority, and its key; both in PEM. `kind` of an address: IP."""
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", f"/CN={host}", "-addext", f"subjectAltName={kind}:{host}"]
        subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
        return certificate.read_text(), key.read_text()


def service() -> KubeObject:
    spec = {"selector": {"app": NAME}, "ports": [{"port": PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": spec}


def pod(image: str) -> KubeObject:
    container = {
        "name": "server",
        "image": image,
        "command": ["python3", "/webhooks/server.py", "/webhooks/tls.crt", "/webhooks/tls.key"],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "files", "mountPath": "/webhooks"}],
    }
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "files", "secret": {"secretName": NAME}}],
    }
    metadata = {"name": NAME, "labels": {"app": NAME}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
