"""LeaderWorkerSet in the rig: its CRD, and its controller with webhooks as a process beside the control plane."""

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from e2e.cluster.rig.guest import log_of, running_guest
from e2e.cluster.rig.layout import API_CERTIFICATE
from e2e.cluster.rig.network import IPV4
from e2e.leader_worker_set.module import controller_program, crd_file, webhook_configurations
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveCluster
from e2e.webhooks.admission import self_signed
from tests.controlplane.processes import wait_until

CRD = "leaderworkersets.leaderworkerset.x-k8s.io"
WEBHOOK_PORT = 9443
NAME = "leader-worker-set"
PROBE: KubeObject = {
    "apiVersion": "leaderworkerset.x-k8s.io/v1",
    "kind": "LeaderWorkerSet",
    "metadata": {"name": "probe", "namespace": "default"},
    "spec": {"leaderWorkerTemplate": {"workerTemplate": {"spec": {"containers": [{"name": "a", "image": "a"}]}}}},
}


@contextmanager
def leader_worker_sets(cluster: LiveCluster, folder: Path) -> Iterator[None]:
    """Meanwhile the rig's cluster has them. `folder` takes the controller's files."""
    # Client-side apply would repeat the whole CRD in an annotation, which has no room for it.
    cluster.kubectl("apply", "--server-side", f"--filename={crd_file()}")
    # A wait for the condition fails at once where there is no condition yet.
    known = "--for=jsonpath={.status.acceptedNames.kind}=LeaderWorkerSet"
    cluster.kubectl("wait", known, f"crd/{CRD}", "--timeout=60s")
    certificate, key = self_signed(IPV4.control_plane, "IP")
    (folder / "tls.crt").write_text(certificate)
    (folder / "tls.key").write_text(key)
    (folder / "kubeconfig").write_text(json.dumps(kubeconfig(cluster.kubeconfig)))
    (folder / "config.yaml").write_text(json.dumps(configuration(folder)))  # JSON is YAML
    ca_bundle = base64.b64encode(certificate.encode()).decode()
    with running_guest(NAME, command(folder)) as controller:
        cluster.apply(*webhook_configurations(f"https://{IPV4.control_plane}:{WEBHOOK_PORT}", ca_bundle))
        wait_until(lambda: is_defaulted(cluster, controller), 60, "LeaderWorkerSet's webhooks", POLL_SECONDS)
        yield


def command(folder: Path) -> list[str]:
    files = [f"--kubeconfig={folder / 'kubeconfig'}", f"--config={folder / 'config.yaml'}"]
    return [str(controller_program()), *files]


def kubeconfig(outside: Path) -> dict[str, Any]:
    """The rig's own, for who is in the cluster's network, where there is no relay."""
    config: dict[str, Any] = json.loads(outside.read_text())
    [named] = config["clusters"]
    named["cluster"] = {"server": IPV4.api_server, "certificate-authority": str(API_CERTIFICATE)}
    return config


def configuration(folder: Path) -> dict[str, Any]:
    return {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "webhook": {"host": IPV4.control_plane, "port": WEBHOOK_PORT, "certDir": str(folder)},
        "internalCertManagement": {"enable": False},  # it looks after a Secret for the webhooks' Service
        "leaderElection": {"leaderElect": False},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": "0"},
    }


def is_defaulted(cluster: LiveCluster, controller: subprocess.Popen[bytes]) -> bool:
    """Whether the API server asks the webhooks: what they fill in, the CRD does not."""
    assert controller.poll() is None, log_of(NAME).read_text()[-4000:]
    command = cluster.command("create", "--filename=-", "--dry-run=server", "--output=json")
    done = subprocess.run(
        command, input=yaml.safe_dump(PROBE), env=cluster.environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode == 0 and "networkConfig" in json.loads(done.stdout)["spec"]
