"""Why a pod, or a Deployment that cannot make its pods, is not ready yet: one reason and one sentence.

Pure reading of pod and Deployment status, and of a pod's Events where its status says too little; the reasons are those
of api/conditions.py. A container's status is read in containers.py, a pod's Events in pod_events.py. A loader of
models has words of its own (model_loader.py).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import ROLE_LABEL, ROLE_ROUTER
from kvasir_operator.kube.kinds import KubeObject, is_terminating, label_of
from kvasir_operator.observe.containers import (
    all_containers,
    has_ended_well,
    is_sidecar,
    last_end,
    own_containers,
    why_container_fails,
)
from kvasir_operator.observe.model_loader import DownloadProgress, describe_download, is_loader, why_loader_fails
from kvasir_operator.observe.pod_events import why_creation_fails

_ENDED_PHASES = ("Failed", "Succeeded")
# The scheduler's words for a claim that is missing, unbound, or bound nowhere that the pod could run.
_NO_VOLUME = re.compile(r"persistent ?volume", re.IGNORECASE)


@dataclass(frozen=True)
class Waiting:
    """`message` names the pod or Deployment and says what is seen."""

    reason: Reason
    message: str


def is_ready(pod: KubeObject) -> bool:
    """Ready and not on its way out."""
    return not is_terminating(pod) and _pod_condition(pod, "Ready").get("status") == "True"


def has_ended(pod: KubeObject) -> bool:
    """Its containers have ended for good; whoever made it makes another."""
    return pod.get("status", {}).get("phase") in _ENDED_PHASES


def is_unschedulable(pod: KubeObject) -> bool:
    """The scheduler finds no node for it."""
    return _pod_condition(pod, "PodScheduled").get("reason") == "Unschedulable"


def why_pod_waits(
    pod: KubeObject, events: Sequence[KubeObject] = (), download: DownloadProgress | None = None
) -> Waiting | None:
    """`events` are the pod's own, `download` what its loader says.

    None for a pod that is ready, on its way out, or given up and replaced.
    """
    if is_ready(pod) or is_terminating(pod) or has_ended(pod):
        return None
    fails = (_why_fails(each, download) for each in all_containers(pod) if not _is_run_again(pod, each))
    failure = next((each for each in fails if each is not None), None)
    reason, detail = _unscheduled(pod) or failure or why_creation_fails(events) or _starting(pod, download)
    return Waiting(reason, f"pod {pod['metadata']['name']}: {detail}")


def why_pods_ended(pods: Sequence[KubeObject]) -> Waiting | None:
    """How the last of these ended for good (evicted, refused by its node, with its node), and how many of them have.

    None where a pod that was made after it is ready.
    """
    ready_since = max((_made_at(pod) for pod in pods if is_ready(pod)), default="")
    failed = [pod for pod in pods if pod.get("status", {}).get("phase") == "Failed" and _made_at(pod) > ready_since]
    if not failed:
        return None
    last = max(failed, key=_made_at)
    status = last["status"]
    ends = [last_end(each) for each in own_containers(last)]
    how = ": ".join(text for text in (status.get("reason"), status.get("message")) if text) or "; ".join(ends)
    number = f", as did {len(failed) - 1} before it" if len(failed) > 1 else ""
    return Waiting(Reason.POD_FAILED, f"pod {last['metadata']['name']} ended{number}: {how.strip()}")


def _made_at(pod: KubeObject) -> str:
    return str(pod["metadata"]["creationTimestamp"])


def why_deployment_waits(deployment: KubeObject) -> Waiting | None:
    """What keeps a Deployment from making pods at all: a quota, or an admission policy."""
    for condition in deployment.get("status", {}).get("conditions", []):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            message = condition.get("message", "")
            reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in message else Reason.POD_CREATION_FAILED
            return Waiting(reason, f"Deployment {deployment['metadata']['name']}: {message}")
    return None


def _unscheduled(pod: KubeObject) -> tuple[Reason, str] | None:
    scheduled = _pod_condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return None
    if scheduled.get("reason") == "SchedulingGated":
        gates = ", ".join(gate["name"] for gate in pod.get("spec", {}).get("schedulingGates", []))
        return Reason.SCHEDULING_GATED, f"scheduling waits for what set its gates{f': {gates}' if gates else ''}"
    if scheduled.get("reason") != "Unschedulable":
        return None
    message = scheduled.get("message") or "no node has room"
    return Reason.VOLUME_UNAVAILABLE if _NO_VOLUME.search(message) else Reason.INSUFFICIENT_CAPACITY, message


def _is_run_again(pod: KubeObject, container: KubeObject) -> bool:
    """An init container that has ended well whenever it ended: a node that was restarted has them all run once more."""
    if not has_ended_well(container) or "waiting" in container.get("state", {}):
        return False
    return container in pod["status"].get("initContainerStatuses", []) and not is_sidecar(pod, container["name"])


def _why_fails(container: KubeObject, download: DownloadProgress | None) -> tuple[Reason, str] | None:
    return why_loader_fails(container, download) if is_loader(container) else why_container_fails(container)


def _starting(pod: KubeObject, download: DownloadProgress | None) -> tuple[Reason, str]:
    if (described := describe_download(pod, download)) is not None:
        return Reason.DOWNLOADING_MODEL, described
    inits = pod.get("status", {}).get("initContainerStatuses", [])
    containers = own_containers(pod)
    running = [each["name"] for each in inits if "running" in each.get("state", {})]
    first = next((name for name in running if not is_sidecar(pod, name)), None)
    if first is not None:
        return Reason.INITIALIZING, f"init container {first} is running"
    if any("waiting" in container.get("state", {}) for container in containers):
        return Reason.PULLING_IMAGE, "the image is being pulled or a volume is being mounted"
    if not containers:
        return Reason.WAITING_FOR_PODS, "no container has been started"
    if all(container.get("ready") for container in containers):
        return _held_back(pod)
    if any(has_been_ready(pod, container) for container in containers):
        return Reason.NOT_RESPONDING, "it was ready, and its readiness probe fails"
    if label_of(pod, ROLE_LABEL) == ROLE_ROUTER:
        return Reason.STARTING_ROUTER, "the router is starting"
    return Reason.LOADING_MODEL, "the engine is loading the model"


def _held_back(pod: KubeObject) -> tuple[Reason, str]:
    """Its containers are ready and it is not: a readiness gate of somebody's, else its node."""
    gates = [gate["conditionType"] for gate in pod.get("spec", {}).get("readinessGates", [])]
    closed = [gate for gate in gates if _pod_condition(pod, gate).get("status") != "True"]
    if closed:
        return (
            Reason.READINESS_GATE_CLOSED,
            f"its containers are ready; readiness gates not yet true: {', '.join(closed)}",
        )
    unready = [each["name"] for each in all_containers(pod) if not each.get("ready") and _runs_beside(pod, each)]
    if unready:
        return Reason.SIDECAR_NOT_READY, f"Kvasir's containers are ready, and these are not: {', '.join(unready)}"
    return Reason.NODE_NOT_READY, f"node {pod.get('spec', {}).get('nodeName', '?')} no longer reports how it is"


def has_been_ready(pod: KubeObject, container: KubeObject) -> bool:
    """Since the container's start: the readiness of the pod, which is not ready now, changed after it."""
    changed_at: str = _pod_condition(pod, "Ready").get("lastTransitionTime") or ""
    started_at: str = container.get("state", {}).get("running", {}).get("startedAt") or ""
    return bool(started_at) and changed_at > started_at


def _runs_beside(pod: KubeObject, container: KubeObject) -> bool:
    is_init = container in pod["status"].get("initContainerStatuses", [])
    return not is_init or is_sidecar(pod, container["name"])


def _pod_condition(pod: KubeObject, name: str) -> dict[str, str]:
    conditions = pod.get("status", {}).get("conditions", [])
    return next((condition for condition in conditions if condition["type"] == name), {})
