"""Objects as an API server would return them, as small as the tests of the operator's decisions need them."""

from typing import Any

from kvasir_operator.api.labels import (
    GROUP_LABEL,
    GROUP_SIZE,
    RANK_LABEL,
    REVISION_LABEL,
    REVISION_NUMBER,
    ROLE_LABEL,
    SERVICE_LABEL,
    group_name,
)
from kvasir_operator.kube.kinds import LEADER_WORKER_SET

KubeObject = dict[str, Any]
NOW = "2026-11-20T10:00:00Z"


def service(name: str = "llama", uid: str = "uid-1", status: KubeObject | None = None) -> KubeObject:
    metadata = {"name": name, "namespace": "models", "uid": uid, "generation": 3, "resourceVersion": "9"}
    metadata["creationTimestamp"] = NOW
    return {
        "apiVersion": "serving.kvasir.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": metadata,
        "status": status or {},
    }


def owner(name: str = "llama", uid: str = "uid-1") -> KubeObject:
    return {
        "apiVersion": "serving.kvasir.dev/v1alpha1",
        "kind": "InferenceService",
        "name": name,
        "uid": uid,
        "controller": True,
    }


def child(kind: str = "ServiceAccount", name: str = "llama-a", **fields: Any) -> KubeObject:
    """A desired child of `service()`; `fields` are its further top-level fields."""
    api_version = {"Deployment": "apps/v1", "PodDisruptionBudget": "policy/v1"}.get(kind, "v1")
    metadata = {
        "name": name,
        "namespace": "models",
        "labels": {SERVICE_LABEL: "llama"},
        "ownerReferences": [owner()],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


def stored(obj: KubeObject, uid: str = "child-uid", **metadata: Any) -> KubeObject:
    """The same as the API server would store it."""
    return {**obj, "metadata": {**obj["metadata"], "uid": uid, "resourceVersion": "7", **metadata}}


def deployment(
    role: str = "serve", replicas: int = 2, total: int | None = None, updated: int | None = None, revision: str = "aaaa"
) -> KubeObject:
    total = replicas if total is None else total
    labels = {SERVICE_LABEL: "llama", ROLE_LABEL: role}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"llama-{role}", "namespace": "models", "labels": labels, "generation": 1},
        "spec": {
            "replicas": replicas,
            "template": {"metadata": {"labels": {**labels, REVISION_LABEL: revision}}},
        },
        "status": {
            "observedGeneration": 1,
            "replicas": total,
            "updatedReplicas": total if updated is None else updated,
        },
    }


def stateful_set(
    index: int = 0,
    revision: str = "aaaa",
    role: str = "serve",
    size: int = 2,
    is_running: bool = True,
    **annotations: str,
) -> KubeObject:
    """Of a group, as the operator made it; `is_running` False: it is kept without pods."""
    name = group_name("llama", role, revision, index)
    labels = {SERVICE_LABEL: "llama", ROLE_LABEL: role, REVISION_LABEL: revision, GROUP_LABEL: name}
    replicas = size if is_running else 0
    probe = {"periodSeconds": 2, "failureThreshold": 3600}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"startupProbe": probe}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": name,
            "namespace": "models",
            "labels": labels,
            "generation": 1,
            "uid": f"uid-{name}",
            "resourceVersion": "7",
            "ownerReferences": [owner()],
            "annotations": {GROUP_SIZE: str(size), REVISION_NUMBER: "1", **annotations},
        },
        "spec": {
            "replicas": replicas,
            "serviceName": f"llama-{role}-ranks",
            "selector": {"matchLabels": labels},
            "template": template,
        },
        "status": {"observedGeneration": 1, "replicas": replicas},
    }


def leader_worker_set(
    index: int = 0, revision: str = "aaaa", role: str = "serve", is_running: bool = True, **annotations: str
) -> KubeObject:
    """Of a group of two pods, as `stateful_set`."""
    like = stateful_set(index, revision, role, is_running=is_running, **annotations)
    replicas = int(is_running)
    return {
        **like,
        "apiVersion": LEADER_WORKER_SET.api_version,
        "kind": LEADER_WORKER_SET.kind,
        "spec": {
            "replicas": replicas,
            "leaderWorkerTemplate": {"size": 2, "workerTemplate": like["spec"]["template"]},
        },
        "status": {"replicas": replicas},
    }


def member(rank: int, group: KubeObject, at: str = NOW, **fields: Any) -> KubeObject:
    """A pod of a group, made `at` (RFC 3339); `fields` as of `pod`."""
    name = group["metadata"]["name"]
    if group.get("kind") == LEADER_WORKER_SET.kind and rank > 0:
        name = f"{name}-0"  # the leader's, and of the StatefulSet of its workers
    found = pod(f"{name}-{rank}", **fields)
    found["metadata"] |= {"creationTimestamp": at, "labels": {**group["metadata"]["labels"], RANK_LABEL: str(rank)}}
    found["spec"] = {"nodeName": f"node-{rank}"}
    return found


def pod(name: str, role: str = "serve", ready: bool = True, leaving: bool = False, **status: Any) -> KubeObject:
    """On a node; `status` replaces fields of the pod's status."""
    metadata: KubeObject = {
        "name": name,
        "namespace": "models",
        "uid": f"uid-{name}",
        "creationTimestamp": NOW,
        "labels": {SERVICE_LABEL: "llama", ROLE_LABEL: role},
    }
    if leaving:
        metadata["deletionTimestamp"] = NOW
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    running = {"name": "engine", "state": {"running": {}}, "ready": ready, "restartCount": 0}
    return {
        "metadata": metadata,
        "spec": {"nodeName": "node-1"},
        "status": {"conditions": [condition], "containerStatuses": [running], **status},
    }


def waiting_container(reason: str, message: str = "", **fields: Any) -> KubeObject:
    return {
        "name": "engine",
        "state": {"waiting": {"reason": reason, "message": message}},
        "ready": False,
        "restartCount": 0,
        **fields,
    }


def pod_event(reason: str, message: str = "", at: str = NOW, pod_name: str = "p") -> KubeObject:
    """As a kubelet reports it about `pod(pod_name)`; `at` is RFC 3339, and names the Event too."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod_name}.{reason}.{at}", "namespace": "models", "creationTimestamp": at},
        "involvedObject": {"kind": "Pod", "name": pod_name, "uid": f"uid-{pod_name}"},
        "source": {"component": "kubelet", "host": "node-1"},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
    }
