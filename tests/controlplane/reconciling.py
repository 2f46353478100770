"""Passes of the operator's reconciler over a real API server, one write at a time in sight."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from kubernetes.dynamic.exceptions import NotFoundError

from kvasir_operator.api.labels import (
    REVISION_LABEL,
    REVISION_NUMBER,
    SERVICE_LABEL,
    role_selector,
    selector_text,
    workload_name,
)
from kvasir_operator.api.parse import parse_service
from kvasir_operator.apply.plan import APPLIED_HASH
from kvasir_operator.desired.objects import desired_service
from kvasir_operator.kube.client import ClientHooks, KubeClient
from kvasir_operator.kube.configuration import load_configuration
from kvasir_operator.kube.kinds import (
    CHILD_KINDS,
    INFERENCE_SERVICE,
    OPTIONAL_KINDS,
    Kind,
    KubeObject,
    ObjectKey,
    ServiceKey,
    object_key,
)
from kvasir_operator.observe.gateway import GatewayObserver
from kvasir_operator.observe.waiting import is_ready
from kvasir_operator.reconcile import Outcome, Reconciler
from kvasir_operator.rollout.scale_down import ReadWork
from kvasir_operator.settings import OperatorSettings

from .control_plane import ControlPlane
from .fake_node import NODE, bind_pod, list_pods, report_ready
from .processes import wait_until

SETTINGS = OperatorSettings()
FEATURES = frozenset()
NAME = "llama"
Found = TypeVar("Found")
WRITES = ("apply", "apply_status", "patch", "create", "replace", "delete")


class Crashed(Exception):
    """Stands for the end of the operator's process right after a write."""


@dataclass(frozen=True)
class Pass:
    """What one pass wrote, as (verb, kind), and how it ended; `outcome` is None after a crash."""

    writes: list[tuple[str, str]]
    outcome: Outcome | None


class Writes:
    """Keeps the writes that were accepted, and raises Crashed after number `crash_after` (from 1); None never does."""

    def __init__(self, crash_after: int | None) -> None:
        self.accepted: list[tuple[str, str]] = []
        self._crash_after = crash_after

    def hear(self, verb: str, kind: str, error: Exception | None) -> None:
        if error is not None or verb not in WRITES:
            return
        self.accepted.append((verb, kind))
        if len(self.accepted) == self._crash_after:
            raise Crashed


class Connection:
    """A client and its event loop, which know nothing but the way: all passes share them, and their TLS handshakes."""

    def __init__(self, kubeconfig: Path) -> None:
        self._runner = asyncio.Runner()
        self._writes = Writes(None)
        self._client = self._runner.run(self._open(kubeconfig))

    def run(self, body: Callable[[KubeClient], Coroutine[Any, Any, Found]], writes: Writes) -> Found:
        self._writes = writes
        return self._runner.run(body(self._client))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    async def _open(self, kubeconfig: Path) -> KubeClient:
        configuration = await load_configuration(str(kubeconfig))
        return KubeClient(configuration, ClientHooks(on_request=lambda *request: self._writes.hear(*request)))


@cache
def connection_to(control_plane: ControlPlane) -> Connection:
    connection = Connection(control_plane.operator_kubeconfig)
    control_plane.resources.callback(connection.close)
    return connection


async def no_work(pods: Iterable[KubeObject]) -> dict[str, int]:
    """What engines that do not run report of their work."""
    return {}


def run_pass(
    control_plane: ControlPlane,
    namespace: str,
    name: str = NAME,
    crash_after: int | None = None,
    read_work: ReadWork = no_work,
    settings: OperatorSettings = SETTINGS,
    features: frozenset[Kind] = FEATURES,
) -> Pass:
    """One pass of a new operator, which knows nothing of earlier ones."""

    connection, writes = connection_to(control_plane), Writes(crash_after)

    async def body(client: KubeClient) -> Outcome | None:
        gateway = GatewayObserver(client, settings.defaults.gateway, None, lambda key: None)
        reconciler = Reconciler(client, settings, lambda: features, gateway, read_work=read_work)
        try:
            return await reconciler.reconcile(ServiceKey(namespace, name))
        except Crashed:
            return None

    return Pass(writes.accepted, connection.run(body, writes))


def settle(control_plane: ControlPlane, namespace: str, name: str = NAME) -> None:
    """Passes until one has nothing to write, while the cluster's own controllers catch up."""

    def is_settled() -> bool:
        return controllers_caught_up(control_plane, namespace) and not run_pass(control_plane, namespace, name).writes

    wait_until(is_settled, 30, f"service {name} to settle")


def controllers_caught_up(control_plane: ControlPlane, namespace: str) -> bool:
    """Whether every Deployment's status speaks of its present spec and of the pods that are there."""
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    return all(is_caught_up(control_plane, each) for each in control_plane.request("get", path)["items"])


def is_caught_up(control_plane: ControlPlane, deployment: KubeObject) -> bool:
    metadata, spec, status = deployment["metadata"], deployment["spec"], deployment.get("status", {})
    pods = [
        pod
        for pod in list_pods(control_plane, metadata["namespace"], selector_text(spec["selector"]["matchLabels"]))
        if "deletionTimestamp" not in pod["metadata"]
    ]
    return (
        status.get("observedGeneration") == metadata["generation"]
        and status.get("replicas", 0) == len(pods) >= spec["replicas"]
        and status.get("readyReplicas", 0) == sum(map(is_ready, pods))
    )


def roll_out(control_plane: ControlPlane, namespace: str, name: str = NAME) -> None:
    """Report engine pods ready, and run passes, until all are of the current revision and none is left to be made."""

    def is_rolled_out() -> bool:
        mark_engines_ready(control_plane, namespace, name)
        writes = run_pass(control_plane, namespace, name).writes
        wanted = get_service(control_plane, namespace, name)["spec"]["replicas"]
        revisions = [revision_of_pod(pod) for pod in engine_pods(control_plane, namespace, name)]
        return not writes and revisions == wanted * [current_revision(control_plane, namespace, name)]

    wait_until(is_rolled_out, 60, f"engines of {name} to be replaced")


def mark_engines_ready(control_plane: ControlPlane, namespace: str, name: str = NAME) -> None:
    """Those that there are by now."""
    for pod in engine_pods(control_plane, namespace, name):
        if not is_ready(pod):
            with suppress(NotFoundError):  # it went after it was listed
                bind_pod(control_plane, pod, NODE)
                report_ready(control_plane, pod)


def engine_pods(control_plane: ControlPlane, namespace: str, name: str = NAME) -> list[KubeObject]:
    """Those that are not being deleted."""
    pods = list_pods(control_plane, namespace, selector_text(role_selector(name, "serve")))
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def revision_of_pod(pod: KubeObject) -> str:
    return str(pod["metadata"]["labels"][REVISION_LABEL])


def current_revision(control_plane: ControlPlane, namespace: str, name: str = NAME) -> str:
    """As a pass would have it."""
    service = parse_service(get_service(control_plane, namespace, name))
    return desired_service(service, SETTINGS).revision


def current_engine(control_plane: ControlPlane, namespace: str, name: str = NAME) -> str:
    """Name of the current revision's Deployment and Service."""
    return workload_name(name, "serve", current_revision(control_plane, namespace, name))


def manifest(namespace: str, name: str = NAME, **spec: Any) -> KubeObject:
    """A service of two CPU engines behind two routers; `spec` replaces fields."""
    base = {
        "model": {"source": "pvc://checkpoints/model"},
        "engine": {"device": "cpu"},
        "resources": {"cpu": "1500m", "memory": "2048Mi"},
        "replicas": 2,
    }
    return {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**base, **spec},
    }


def path_of(kind: Kind, namespace: str, name: str = "") -> str:
    prefix = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.version}"
    return f"{prefix}/namespaces/{namespace}/{kind.plural}" + (f"/{name}" if name else "")


def get_service(control_plane: ControlPlane, namespace: str, name: str = NAME) -> KubeObject:
    return control_plane.request("get", path_of(INFERENCE_SERVICE, namespace, name))


def get_children(control_plane: ControlPlane, namespace: str, name: str = NAME) -> dict[ObjectKey, KubeObject]:
    """Every child by its key, as the API server stores it."""
    children: dict[ObjectKey, KubeObject] = {}
    for kind in [kind for kind in CHILD_KINDS if kind not in OPTIONAL_KINDS]:
        selector = f"{SERVICE_LABEL}={name}"
        for item in control_plane.request("get", path_of(kind, namespace), labelSelector=selector)["items"]:
            obj = {"apiVersion": kind.api_version, "kind": kind.kind, **item}
            children[object_key(obj)] = obj
    return children


def get_events(control_plane: ControlPlane, namespace: str) -> list[tuple[str, str]]:
    """(reason, message) of the Events about services."""
    items = control_plane.request("get", f"/api/v1/namespaces/{namespace}/events")["items"]
    ours = [each for each in items if each["involvedObject"]["kind"] == INFERENCE_SERVICE.kind]
    return [(each["reason"], each["message"]) for each in ours]


def conditions(service: KubeObject) -> dict[str, tuple[str, str]]:
    """(status, reason) by type."""
    return {each["type"]: (each["status"], each["reason"]) for each in service["status"]["conditions"]}


def portrait(control_plane: ControlPlane, namespace: str, name: str) -> str:
    """All that a service's children and status say, without what differs between equal services (names, ids, times)."""
    children = get_children(control_plane, namespace, name).values()
    alike = _without_names(name, children)
    parts = sorted(alike(json.dumps(_child_portrait(child), sort_keys=True)) for child in children)
    status = get_service(control_plane, namespace, name)["status"]
    counts = {key: value for key, value in status.items() if key not in ("conditions", "roles")}
    roles = [{**role, "message": ""} for role in status["roles"]]
    reported = json.dumps([counts, roles, conditions({"status": status})], sort_keys=True, indent=1)
    return "\n".join([*parts, alike(reported)])


def _without_names(name: str, children: Iterable[KubeObject]) -> Callable[[str], str]:
    """Revisions by their order of use: names are in their templates, and so in their hashes."""
    metadata = [child["metadata"] for child in children if REVISION_NUMBER in child["metadata"].get("annotations", {})]
    numbers = {each["labels"][REVISION_LABEL]: each["annotations"][REVISION_NUMBER] for each in metadata}

    def alike(text: str) -> str:
        for revision, number in numbers.items():
            text = text.replace(revision, f"REVISION-{number}")
        return text.replace(name, "NAME")

    return alike


def _child_portrait(child: KubeObject) -> KubeObject:
    metadata = child["metadata"]
    annotations = {key: value for key, value in metadata.get("annotations", {}).items() if key != APPLIED_HASH}
    spec = {key: value for key, value in child.get("spec", {}).items() if key not in ("clusterIP", "clusterIPs")}
    kept: KubeObject = {key: child[key] for key in ("kind", "rules", "subjects", "roleRef") if key in child}
    data = child.get("data", {})
    kept["data"] = sorted(data) if child["kind"] == "Secret" else data
    return {**kept, "labels": metadata["labels"], "annotations": annotations, "spec": spec}
