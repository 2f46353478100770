"""Passes of the operator's reconciler over a real API server, one write at a time in sight."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kubernetes.dynamic.exceptions import NotFoundError

from kvasir_operator.api.labels import SERVICE_LABEL, selector_text
from kvasir_operator.kinds import CHILD_KINDS, INFERENCE_SERVICE, Kind, KubeObject, ObjectKey, ServiceKey, object_key
from kvasir_operator.kube import KubeClient, load_configuration
from kvasir_operator.plan import APPLIED_HASH
from kvasir_operator.reconcile import Outcome, Reconciler
from kvasir_operator.scale_down import ReadWork
from kvasir_operator.settings import OperatorSettings
from kvasir_operator.waiting import is_ready

from .control_plane import ControlPlane
from .fake_node import list_pods
from .processes import wait_until

SETTINGS = OperatorSettings()
NAME = "llama"


class Crashed(Exception):
    """Stands for the end of the operator's process right after a write."""


@dataclass(frozen=True)
class Pass:
    """What one pass wrote, as (verb, kind), and how it ended; `outcome` is None after a crash."""

    writes: list[tuple[str, str]]
    outcome: Outcome | None


class CrashingKube(KubeClient):
    """Counts its writes and raises Crashed after the write with number `crash_after` (from 1); None never does."""

    crash_after: int | None = None

    async def _write(self, verb: str, kind: Kind, call: Callable[[], Awaitable[Any]]) -> KubeObject:
        result = await super()._write(verb, kind, call)
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after == 0:
                raise Crashed
        return result


async def no_work(pods: Iterable[KubeObject]) -> dict[str, int]:
    """What engines that do not run tell of their work."""
    return {}


def run_pass(
    control_plane: ControlPlane,
    namespace: str,
    name: str = NAME,
    crash_after: int | None = None,
    read_work: ReadWork = no_work,
) -> Pass:
    """One pass of a new operator, which knows nothing of earlier ones."""

    async def body() -> Pass:
        writes: list[tuple[str, str]] = []
        configuration = await load_configuration(str(control_plane.operator_kubeconfig))
        configuration.connection_pool_maxsize = 2  # each new connection costs a TLS handshake
        client = CrashingKube(configuration, lambda verb, kind: writes.append((verb, kind)))
        client.crash_after = crash_after
        try:
            reconciler = Reconciler(client, SETTINGS, read_work=read_work)
            return Pass(writes, await reconciler.reconcile(ServiceKey(namespace, name)))
        except Crashed:
            return Pass(writes, None)
        finally:
            await client.close()

    return asyncio.run(body())


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


def roll_out(control_plane: ControlPlane, namespace: str, selector: str) -> None:
    """Report pods ready until none of an earlier revision is left."""

    def is_rolled_out() -> bool:
        try:
            control_plane.mark_pods_ready(namespace, selector)
        except NotFoundError:
            return False  # an old pod went between being listed and being reported
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        return all(
            each["status"].get("updatedReplicas") == each["status"].get("replicas") == each["spec"]["replicas"]
            and each["status"]["observedGeneration"] == each["metadata"]["generation"]
            for each in control_plane.request("get", path, labelSelector=selector)["items"]
        )

    wait_until(is_rolled_out, 30, f"pods with {selector} to be replaced")


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
    for kind in CHILD_KINDS:
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
    children = get_children(control_plane, namespace, name)
    parts = [_child_portrait(child) for _, child in sorted(children.items(), key=lambda pair: str(pair[0]))]
    status = get_service(control_plane, namespace, name)["status"]
    told = {key: value for key, value in status.items() if key not in ("conditions", "roles")}
    roles = [{**role, "message": ""} for role in status["roles"]]
    text = json.dumps([parts, told, roles, conditions({"status": status})], sort_keys=True, indent=1)
    return text.replace(name, "NAME")


def _child_portrait(child: KubeObject) -> KubeObject:
    metadata = child["metadata"]
    annotations = {key: value for key, value in metadata.get("annotations", {}).items() if key != APPLIED_HASH}
    spec = {key: value for key, value in child.get("spec", {}).items() if key not in ("clusterIP", "clusterIPs")}
    kept: KubeObject = {key: child[key] for key in ("kind", "rules", "subjects", "roleRef") if key in child}
    data = child.get("data", {})
    kept["data"] = sorted(data) if child["kind"] == "Secret" else data
    return {**kept, "labels": metadata["labels"], "annotations": annotations, "spec": spec}
