"""What a scheduler and a kubelet would do to pods, by hand: bind them, report them ready, end them."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from kubernetes.dynamic.exceptions import ConflictError, NotFoundError
from urllib3.exceptions import HTTPError

NODE = "node-1"
"""The fake node whose pods end as soon as they are deleted; on nodes of other names a test ends them itself."""
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
POD_ADDRESSES = (f"10.244.{number >> 8 & 255}.{number & 255}" for number in itertools.count(1))
READY_CONDITIONS = ("PodScheduled", "Initialized", "ContainersReady", "Ready")


class Api(Protocol):
    """The part of a control plane that this module speaks to."""

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, content_type: str = ..., **query: str
    ) -> dict[str, Any]: ...

    def watch(self, path: str, **query: str) -> Iterator[dict[str, Any]]: ...


class FakeKubelet:
    """Ends the deleted pods of NODE, in a thread of its own, until its API server is gone."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, api: Api) -> None:
        """Registers NODE, and begins."""
        register_node(api, NODE)
        self._thread = threading.Thread(target=self._run, args=(api,), name="fake kubelet")
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, api: Api) -> None:
        with suppress(HTTPError):
            for event in api.watch("/api/v1/pods", fieldSelector=f"spec.nodeName={NODE}", timeoutSeconds="86400"):
                if event["type"] != "DELETED":
                    end_terminating(api, [event["object"]])


def register_node(api: Api, name: str) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    api.request("patch", f"/api/v1/nodes/{name}", node, APPLY_PATCH, fieldManager="kubelet", force="true")


def list_pods(api: Api, namespace: str, selector: str = "") -> list[dict[str, Any]]:
    path = f"/api/v1/namespaces/{namespace}/pods"
    pods: list[dict[str, Any]] = api.request("get", path, labelSelector=selector)["items"]
    return pods


def bind_pod(api: Api, pod: dict[str, Any], node: str) -> None:
    if "nodeName" not in pod["spec"]:
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}}
        with suppress(ConflictError, NotFoundError):  # it is being deleted
            api.request("post", f"{path_of(pod)}/binding", body | {"target": {"kind": "Node", "name": node}})


def report_ready(api: Api, pod: dict[str, Any], ago: timedelta = timedelta()) -> dict[str, Any]:
    """Report every container as started and the pod as ready at its address, a new one if it has none yet."""
    address = pod["status"].get("podIP") or next(POD_ADDRESSES)
    since = (datetime.now(UTC) - ago).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = ready_status(pod["spec"]["containers"], address, since)
    return api.request("patch", f"{path_of(pod)}/status", {"status": status}, MERGE_PATCH)


def move(api: Api, pod: dict[str, Any], address: str) -> None:
    """Give the pod another address, at which something answers."""
    status = {"podIP": address, "podIPs": [{"ip": address}]}
    api.request("patch", f"{path_of(pod)}/status", {"status": status}, MERGE_PATCH)


def report_loading(api: Api, pod: dict[str, Any], address: str) -> dict[str, Any]:
    """Report that the first init container runs at `address`, and that all others wait."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    waiting = {"state": {"waiting": {"reason": "PodInitializing"}}}
    loader = container_status(pod["spec"]["initContainers"][0], ready=False) | {
        "state": {"running": {"startedAt": now}}
    }
    status = {
        "phase": "Pending",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "initContainerStatuses": [loader],
        "containerStatuses": [container_status(each, ready=False) | waiting for each in pod["spec"]["containers"]],
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": now}],
    }
    return api.request("patch", f"{path_of(pod)}/status", {"status": status}, MERGE_PATCH)


def report_waiting(api: Api, pod: dict[str, Any], reason: str, message: str) -> dict[str, Any]:
    """Report that every container waits, for instance with reason ImagePullBackOff."""
    waiting = {"state": {"waiting": {"reason": reason, "message": message}}}
    status = {
        "phase": "Pending",
        "containerStatuses": [container_status(each, ready=False) | waiting for each in pod["spec"]["containers"]],
        "conditions": [{"type": kind, "status": "False", "reason": "ContainersNotReady"} for kind in READY_CONDITIONS],
    }
    return api.request("patch", f"{path_of(pod)}/status", {"status": status}, MERGE_PATCH)


def report_failed(api: Api, pod: dict[str, Any], message: str) -> dict[str, Any]:
    """Report that a pod which was ready has ended; `message` are the last words of its containers."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    end = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": now, "message": message}}
    status = {
        "containerStatuses": [
            container_status(each, ready=False) | {"state": end} for each in pod["spec"]["containers"]
        ],
        "conditions": [{"type": kind, "status": "False"} for kind in ("ContainersReady", "Ready")],
    }
    return api.request("patch", f"{path_of(pod)}/status", {"status": status}, MERGE_PATCH)


def ready_status(containers: list[dict[str, Any]], address: str, now: str) -> dict[str, Any]:
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": now,
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in READY_CONDITIONS],
        "containerStatuses": [
            container_status(container, ready=True) | {"state": {"running": {"startedAt": now}}}
            for container in containers
        ],
    }


def container_status(container: dict[str, Any], ready: bool) -> dict[str, Any]:
    status = {"name": container["name"], "image": container["image"], "imageID": ""}
    return status | {"ready": ready, "started": ready, "restartCount": 0}


def end_terminating(api: Api, pods: list[dict[str, Any]]) -> None:
    """Let go of every pod that is being deleted, as a kubelet does once its processes have ended."""
    for pod in pods:
        if "deletionTimestamp" in pod["metadata"]:
            with suppress(NotFoundError):  # a namespace's deletion was faster
                api.request("delete", path_of(pod), gracePeriodSeconds="0")


def path_of(pod: dict[str, Any]) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
