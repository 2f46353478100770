"""A running Kubernetes with nodes, as the scenarios act on it: by kubectl, as a user would.

`LiveCluster` is any cluster; `LiveService` is one InferenceService in it. What only our own rig can do (stop a kubelet,
freeze a process) is in e2e/cluster/rig/faults.py; moments that polling would blur are read off a `Watch` (watch.py).
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from tests.controlplane.processes import wait_until

Found = TypeVar("Found")
KubeObject = dict[str, Any]
SYSTEM = "kvasir-system"
METRICS_PORTS = {"serve": 8000, "prefill": 8000, "decode": 8000, "router": 9090}
POLL_SECONDS = 0.5
"""A kubectl costs the machine about as much as a token of every stream: waits leave the processors to the judged."""


class KubectlError(Exception):
    """kubectl ended with a status other than 0; the message is what it said."""


@dataclass(frozen=True)
class LiveCluster:
    kubeconfig: Path
    kubectl_program: Path

    def kubectl(self, *arguments: str, text: str | None = None, seconds: float = 120) -> str:
        """What kubectl printed; raises KubectlError."""
        done = subprocess.run(
            self.command(*arguments), input=text, env=self.environment, capture_output=True, text=True, timeout=seconds
        )
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        """For a kubectl that goes on running, such as port-forward; to be run in `environment`."""
        return [str(self.kubectl_program), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"KUBECONFIG": str(self.kubeconfig)}

    def apply(self, *objects: KubeObject, namespace: str = "default") -> None:
        self.kubectl("apply", f"--namespace={namespace}", "-f", "-", text=yaml.safe_dump_all(objects))

    def get(self, kind: str, name: str, namespace: str = "default") -> KubeObject | None:
        text = self.kubectl("get", kind, name, f"--namespace={namespace}", "--ignore-not-found", "-o", "json")
        found: KubeObject | None = json.loads(text) if text else None
        return found

    def list(self, kind: str, namespace: str | None, selector: str = "") -> list[KubeObject]:
        """`namespace` None: of all."""
        where = "--all-namespaces" if namespace is None else f"--namespace={namespace}"
        text = self.kubectl("get", kind, where, f"--selector={selector}", "-o", "json")
        items: list[KubeObject] = json.loads(text)["items"]
        return items

    @contextmanager
    def port_forward(self, service: str, namespace: str) -> Iterator[str]:
        """The URL of the OpenAI API behind a Service on this machine, for as long as the block runs."""
        target = (f"service/{service}", ":8080", f"--namespace={namespace}")
        command = self.command("port-forward", *target)
        with subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True) as forward:
            try:
                assert forward.stdout is not None
                address = re.search(r"127\.0\.0\.1:\d+", forward.stdout.readline())
                if address is None:
                    raise KubectlError(f"kubectl port-forward {' '.join(target)}: no address; its words are above")
                yield f"http://{address.group()}/v1"
            finally:
                forward.terminate()

    @contextmanager
    def namespace(self, name: str, labels: dict[str, str] | None = None) -> Iterator[str]:
        """Made and, with all that is in it, deleted; the last of it goes while others use the cluster."""
        earlier = self.get("namespace", name)
        if earlier is not None and is_terminating(earlier):
            self.kubectl("wait", "--for=delete", f"namespace/{name}", "--timeout=100s")
        metadata = {"name": name, "labels": labels or {}}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        what = f"namespace {name} to admit pods"
        wait_until(lambda: self.get("serviceaccount", "default", name), 30, what, POLL_SECONDS)
        try:
            yield name
        finally:
            # Pods drain for as long as their grace period says, which nobody waits for here.
            self.kubectl("delete", "inferenceservices", "--all", f"--namespace={name}", "--ignore-not-found")
            self.kubectl("delete", "pods", "--all", f"--namespace={name}", "--force", "--grace-period=0")
            self.kubectl("delete", "namespace", name, "--wait=false")


@dataclass(frozen=True)
class LiveService:
    """One InferenceService. `name` is that of the object; clients call its model `model`."""

    cluster: LiveCluster
    namespace: str
    name: str
    model: str

    @property
    def status(self) -> KubeObject:
        found = self.cluster.get("inferenceservice", self.name, self.namespace)
        status: KubeObject = {} if found is None else found.get("status", {})
        return status

    @property
    def url(self) -> str:
        """Of the OpenAI API, for clients inside the cluster."""
        return str(self.status["url"])

    def condition(self, kind: str) -> KubeObject:
        """Empty while the operator has not written it."""
        return next((each for each in self.status.get("conditions", []) if each["type"] == kind), {})

    def is_ready(self) -> bool:
        """Ready and at rest: every pod is there, of the current revision, and the status is of the current spec."""
        found = self.cluster.get("inferenceservice", self.name, self.namespace) or {}
        status, generation = found.get("status", {}), found.get("metadata", {}).get("generation")
        holds = {each["type"]: each["status"] for each in status.get("conditions", [])}
        is_current = status.get("observedGeneration") == generation
        return is_current and holds.get("Ready") == "True" and holds.get("Progressing") == "False"

    def wait_ready(self, seconds: float = 180) -> None:
        """Raises TimeoutError with the conditions as they then are."""
        try:
            wait_until(self.is_ready, seconds, f"{self.name} to be ready", POLL_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {json.dumps(self.status.get('conditions', []), indent=1)}") from error

    def wait_condition(self, kind: str, holds: Callable[[KubeObject], Found | None], seconds: float) -> Found:
        """Raises TimeoutError with the condition as it then is."""
        try:
            what = f"condition {kind} of {self.name}"
            return wait_until(lambda: holds(self.condition(kind)), seconds, what, POLL_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.condition(kind)}") from error

    def patch(self, spec: KubeObject) -> None:
        """Merge into the spec."""
        patch = json.dumps({"spec": spec})
        namespace = f"--namespace={self.namespace}"
        self.cluster.kubectl("patch", "inferenceservice", self.name, namespace, "--type=merge", f"--patch={patch}")

    def tell_to_go(self, pod: str) -> None:
        """Delete a pod as a node's drain does; returns at once."""
        self.cluster.kubectl("delete", "pod", pod, f"--namespace={self.namespace}", "--wait=false")

    def delete(self) -> None:
        """Its pods drain, which nobody waits for here."""
        self.cluster.kubectl("delete", "inferenceservice", self.name, f"--namespace={self.namespace}")

    def children(self, kind: str, role: str) -> list[KubeObject]:
        """Of one role and of every revision, those on their way out included, oldest first."""
        selector = f"serving.kvasir.dev/service={self.name},serving.kvasir.dev/role={role}"
        found = self.cluster.list(kind, self.namespace, selector)
        return sorted(found, key=lambda obj: str(obj["metadata"]["creationTimestamp"]))

    def pods(self, role: str) -> list[KubeObject]:
        """As `children`."""
        return self.children("pods", role)

    def revisions(self) -> dict[str, KubeObject]:
        """The engines' Deployments by their revision, those kept at zero for a rollback included."""
        return {revision_of(workload): workload for workload in self.children("deployments", "serve")}

    def staying_uids(self, *roles: str) -> set[str]:
        """Of the pods that are not told to go."""
        return {uid_of(pod) for role in roles for pod in self.pods(role) if not is_terminating(pod)}

    def metric(self, pod: KubeObject, name: str) -> float:
        """The sum of a series over its labels, as the pod shows it now; 0 where it has none."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name_of(pod)}:{METRICS_PORTS[role_of(pod)]}/proxy/metrics"
        lines = self.cluster.kubectl("get", "--raw", path).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))

    @contextmanager
    def port_forward(self) -> Iterator[str]:
        """The URL of the OpenAI API of the service's own router on this machine, for as long as the block runs."""
        with self.cluster.port_forward(f"{self.name}-router", self.namespace) as url:
            yield url


def deploy_service(
    cluster: LiveCluster, manifest: Path, namespace: str, name: str | None = None, **spec: object
) -> LiveService:
    """Apply a manifest's InferenceService, with parts of its spec replaced and, for a second one, another name."""
    obj = yaml.safe_load(manifest.read_text())
    obj["metadata"]["name"] = name = name or obj["metadata"]["name"]
    obj["spec"] |= spec
    cluster.apply(obj, namespace=namespace)
    return LiveService(cluster, namespace, name, obj["spec"]["model"].get("name", name))


def name_of(obj: KubeObject) -> str:
    return str(obj["metadata"]["name"])


def uid_of(obj: KubeObject) -> str:
    return str(obj["metadata"]["uid"])


def role_of(pod: KubeObject) -> str:
    """Empty for a pod of no service, such as that of the clients."""
    return str(pod["metadata"].get("labels", {}).get("serving.kvasir.dev/role", ""))


def revision_of(obj: KubeObject) -> str:
    """Of an engine's pod, Deployment or Service."""
    return str(obj["metadata"]["labels"]["serving.kvasir.dev/revision"])


def is_terminating(obj: KubeObject) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def holds(obj: KubeObject, condition: str) -> bool:
    """Whether a condition of its status is True."""
    conditions = obj.get("status", {}).get("conditions", [])
    return any(each["type"] == condition and each["status"] == "True" for each in conditions)


def is_pod_ready(pod: KubeObject) -> bool:
    return not is_terminating(pod) and holds(pod, "Ready")
