"""What the controller of LeaderWorkerSets does, as far as pods come and go by it; its restart policy is None here.

A LeaderWorkerSet has a StatefulSet of leaders. Each leader owns one of its workers, which are numbered from 1, so that
they go once it has gone.
"""

from contextlib import suppress
from typing import Any

from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from kvasir_operator.api.labels import LEADER_WORKER_SET_LABEL
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, STATEFUL_SET, KubeObject

from .control_plane import ControlPlane
from .fake_node import MERGE_PATCH, list_pods
from .reconciling import path_of

WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


def look_after_sets(control_plane: ControlPlane, namespace: str) -> None:
    """One look at all of a namespace."""
    for each in leader_worker_sets(control_plane, namespace):
        if "deletionTimestamp" not in each["metadata"]:
            with suppress(NotFoundError):  # it went meanwhile
                _look_after(control_plane, namespace, each)


def leader_worker_sets(control_plane: ControlPlane, namespace: str) -> list[KubeObject]:
    """None where the kind is not served."""
    try:
        found: list[KubeObject] = control_plane.request("get", path_of(LEADER_WORKER_SET, namespace))["items"]
    except NotFoundError:
        return []
    return found


def _look_after(control_plane: ControlPlane, namespace: str, obj: KubeObject) -> None:
    name, template = obj["metadata"]["name"], obj["spec"]["leaderWorkerTemplate"]
    leads = {LEADER_WORKER_SET_LABEL: name, WORKER_INDEX: "0"}
    owner = _owner(LEADER_WORKER_SET.api_version, LEADER_WORKER_SET.kind, obj)
    spec = _spec(name, obj["spec"]["replicas"], template["workerTemplate"], leads)
    _make(control_plane, namespace, name, owner, spec)
    leaders = list_pods(control_plane, namespace, f"{LEADER_WORKER_SET_LABEL}={name},{WORKER_INDEX}=0")
    for leader in leaders:
        if "deletionTimestamp" not in leader["metadata"]:
            follows = {LEADER_WORKER_SET_LABEL: name, "group-of": leader["metadata"]["name"]}
            spec = _spec(name, template["size"] - 1, template["workerTemplate"], follows)
            owner = _owner("v1", "Pod", leader)
            _make(control_plane, namespace, leader["metadata"]["name"], owner, {**spec, "ordinals": {"start": 1}})
    status = {"status": {"replicas": len(leaders)}}
    control_plane.request("patch", f"{path_of(LEADER_WORKER_SET, namespace, name)}/status", status, MERGE_PATCH)


def _make(control_plane: ControlPlane, namespace: str, name: str, owner: dict[str, Any], spec: dict[str, Any]) -> None:
    """Creates the StatefulSet, or scales the one that this owner has."""
    metadata = {"name": name, "namespace": namespace, "ownerReferences": [owner]}
    obj = {"apiVersion": STATEFUL_SET.api_version, "kind": STATEFUL_SET.kind, "metadata": metadata, "spec": spec}
    try:
        control_plane.request("post", path_of(STATEFUL_SET, namespace), obj)
    except ConflictError:
        live = control_plane.request("get", path_of(STATEFUL_SET, namespace, name))
        if live["metadata"]["ownerReferences"][0]["uid"] == owner["uid"]:
            patch = {"spec": {"replicas": spec["replicas"]}}
            control_plane.request("patch", path_of(STATEFUL_SET, namespace, name), patch, MERGE_PATCH)


def _spec(service_name: str, replicas: int, template: KubeObject, own_labels: dict[str, str]) -> dict[str, Any]:
    metadata = template["metadata"]
    return {
        "replicas": replicas,
        "serviceName": service_name,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": own_labels},
        "template": {**template, "metadata": {**metadata, "labels": {**metadata["labels"], **own_labels}}},
    }


def _owner(api_version: str, kind: str, obj: KubeObject) -> dict[str, Any]:
    metadata = obj["metadata"]
    owner = {"apiVersion": api_version, "kind": kind, "name": metadata["name"], "uid": metadata["uid"]}
    return {**owner, "controller": True, "blockOwnerDeletion": True}
