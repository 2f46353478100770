"""What an operator is given as secrets, or draws, is in no object but Secrets, and in none of its words."""

import json
import socketserver
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import yaml
from tests.planted_secrets import decoded, leaks, planted

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, SECRET

from .control_plane import ControlPlane
from .operator_process import OperatorProcess, running_operator
from .processes import wait_until
from .reconciling import conditions, get_service, manifest, path_of
from .rights import role_kubeconfig
from .test_gateway import GATEWAY, PODS, behind_gateway, make_gateway

SECONDS = 120.0
KEYS, CREDENTIALS = "client-keys", "model-credentials"
GATED = "kvasir-runtime: error: ModelAccessDenied: hf://org/name is gated"


class NoHttp(socketserver.StreamRequestHandler):
    """A Prometheus that is none: the client's errors about it hold the request, with its token."""

    def handle(self) -> None:
        while self.rfile.readline().strip():
            """The request's head."""
        self.wfile.write(b"SSH-2.0-OpenSSH_10\r\n")


@pytest.fixture
def no_prometheus() -> Iterator[str]:
    """Its URL."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), NoHttp) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def make_secret(control_plane: ControlPlane, namespace: str, name: str, **values: str) -> None:
    data = {key: b64encode(value.encode()).decode() for key, value in values.items()}
    metadata = {"name": name, "namespace": namespace}
    control_plane.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})


def test_no_secret_is_shown_but_in_secrets(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_prometheus: str
) -> None:
    names = ("client-key", "hub-token", "store-key", "prometheus-token", "gateway-secret")
    given = {name: planted(name) for name in names}
    make_secret(control_plane, namespace, KEYS, acme=given["client-key"])
    credentials = {"HF_TOKEN": given["hub-token"], "AWS_SECRET_ACCESS_KEY": given["store-key"]}
    make_secret(control_plane, namespace, CREDENTIALS, **credentials)
    (tmp_path / "token").write_text(given["prometheus-token"])
    monkeypatch.setenv("KVASIR_GATEWAY_SECRET", given["gateway-secret"])
    kubeconfig = role_kubeconfig(control_plane, namespace, tmp_path)
    with ExitStack() as stack:
        flags = (
            *gateway_flags(control_plane, namespace, tmp_path),
            f"--prometheus-url={no_prometheus}",
            "--autoscaling-seconds=1",
        )
        flags = (*flags, f"--prometheus-token-file={tmp_path / 'token'}", "--log-level=debug", "--leader-election")
        operator = stack.enter_context(
            running_operator(kubeconfig, tmp_path / "log", f"--namespace={namespace}", *flags)
        )
        operator.wait_until_ready()
        live(control_plane, namespace)
        shown = {**objects(control_plane, namespace), **words(operator)}
    secrets = control_plane.request("get", path_of(SECRET, namespace))["items"]
    drawn = [value for secret in secrets if "ownerReferences" in secret["metadata"] for value in decoded(secret)]
    assert len(drawn) == 2, "of the router, and what the gateway shows to the engines behind it"
    token = json.loads(kubeconfig.read_text())["users"][0]["user"]["token"]
    assert "ClientResponseError" in shown[path_of(INFERENCE_SERVICE, namespace)]
    assert leaks([*given.values(), *drawn, token], shown) == []
    assert len(leaks([given["client-key"], *credentials.values()], {"Secrets": json.dumps(secrets)})) == 3


def gateway_flags(control_plane: ControlPlane, namespace: str, directory: Path) -> tuple[str, ...]:
    make_gateway(control_plane, namespace)
    control_plane.mark_pods_ready(namespace, PODS)
    defaults = {"gateway": {"namespace": namespace, "name": GATEWAY, "podLabels": {"app": GATEWAY}}}
    (directory / "defaults.yaml").write_text(yaml.safe_dump(defaults))
    return (f"--pod-defaults={directory / 'defaults.yaml'}",)


def live(control_plane: ControlPlane, namespace: str) -> None:
    """Two services are made; one has trouble, is ready, and is not scaled since nobody answers for its Prometheus."""
    control_plane.apply(behind_gateway(namespace, "shared", "big"))
    model = {"source": "hf://org/name", "cache": {"sizeLimit": "20Gi"}, "secretRef": {"name": CREDENTIALS}}
    autoscaling = {"minReplicas": 1, "maxReplicas": 2}
    router = {"apiKeysSecretRef": {"name": KEYS}}
    control_plane.apply(manifest(namespace, replicas=1, model=model, autoscaling=autoscaling, router=router))
    pods = f"{SERVICE_LABEL}=llama"
    control_plane.mark_pods_waiting(namespace, pods, "CrashLoopBackOff", "", 3)
    wait_for(control_plane, namespace, "Degraded", "True")
    control_plane.mark_pods_ready(namespace, pods, 3, ago=timedelta(hours=1))
    wait_for(control_plane, namespace, "Ready", "True")
    wait_for(control_plane, namespace, "ScalingActive", "False")


def wait_for(control_plane: ControlPlane, namespace: str, kind: str, status: str) -> None:
    def is_so() -> bool:
        service = get_service(control_plane, namespace)
        return "conditions" in service.get("status", {}) and conditions(service).get(kind, ("", ""))[0] == status

    wait_until(is_so, SECONDS, f"condition {kind} to be {status}")


def objects(control_plane: ControlPlane, namespace: str) -> dict[str, str]:
    """All of a namespace but Secrets, Events and Leases among them, by the path of their kind."""
    groups = [group["preferredVersion"]["groupVersion"] for group in control_plane.request("get", "/apis")["groups"]]
    found = {}
    for prefix in ("/api/v1", *(f"/apis/{group}" for group in groups)):
        for kind in control_plane.request("get", prefix)["resources"]:
            if kind["namespaced"] and "list" in kind["verbs"] and kind["name"] != SECRET.plural:
                path = f"{prefix}/namespaces/{namespace}/{kind['name']}"
                found[path] = json.dumps(control_plane.request("get", path)["items"])
    shown = {path for path, text in found.items() if text != "[]"}
    assert {path.rpartition("/")[2] for path in shown} >= {
        "pods",
        "events",
        "leases",
        "inferenceservices",
        "deployments",
    }
    return found


def words(operator: OperatorProcess) -> dict[str, str]:
    arguments = Path(f"/proc/{operator.process.pid}/cmdline").read_text()
    return {"log": operator.log.read_text(), "arguments": arguments, "metrics": operator.get("/metrics")[1]}
