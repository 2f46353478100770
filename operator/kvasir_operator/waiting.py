"""Why a pod, or a Deployment that cannot make its pods, is not ready yet: one reason and one sentence.

Pure reading of pod and Deployment status; the reasons are those of api/conditions.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import ROLE_LABEL, ROLE_ROUTER
from kvasir_operator.kinds import KubeObject, is_terminating

_IMAGE_FAILURES = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
_CONFIG_FAILURES = frozenset({"CreateContainerConfigError", "CreateContainerError"})
_CRASHES = frozenset({"CrashLoopBackOff", "RunContainerError", "StartError"})


@dataclass(frozen=True)
class Waiting:
    """`message` names the pod or Deployment and says what is seen."""

    reason: Reason
    message: str


def is_ready(pod: KubeObject) -> bool:
    """Ready and not on its way out."""
    return not is_terminating(pod) and _pod_condition(pod, "Ready").get("status") == "True"


def why_pod_waits(pod: KubeObject) -> Waiting | None:
    """None for a pod that is ready or on its way out."""
    if is_ready(pod) or is_terminating(pod):
        return None
    name = pod["metadata"]["name"]
    reason, detail = _unscheduled(pod) or next(_stuck_containers(pod), None) or _starting(pod)
    return Waiting(reason, f"pod {name}: {detail}")


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
    if scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    return Reason.INSUFFICIENT_CAPACITY, scheduled.get("message") or "no node has room"


def _stuck_containers(pod: KubeObject) -> Iterator[tuple[Reason, str]]:
    status = pod.get("status", {})
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting", {})
        cause, name = waiting.get("reason", ""), container["name"]
        detail = f"container {name}: {cause}: {waiting.get('message', '')}".rstrip(": ")
        if cause in _IMAGE_FAILURES:
            yield Reason.IMAGE_PULL_FAILED, detail
        elif cause in _CONFIG_FAILURES:
            yield Reason.INVALID_CONTAINER_CONFIG, detail
        elif cause in _CRASHES or (container.get("restartCount", 0) >= 3 and not container.get("ready")):
            yield (
                Reason.CRASH_LOOPING,
                f"container {name} ended {container['restartCount']} times{_last_exit(container)}",
            )


def _last_exit(container: KubeObject) -> str:
    last = container.get("lastState", {}).get("terminated")
    if last is None:
        return ""
    return f", last with exit code {last.get('exitCode')} ({last.get('reason', 'unknown')})"


def _starting(pod: KubeObject) -> tuple[Reason, str]:
    status = pod.get("status", {})
    if any("running" in container.get("state", {}) for container in status.get("initContainerStatuses", [])):
        return Reason.INITIALIZING, "an init container is running"
    containers = status.get("containerStatuses", [])
    if any("waiting" in container.get("state", {}) for container in containers):
        return Reason.PULLING_IMAGE, "the image is being pulled or a volume is being mounted"
    if not containers:
        return Reason.WAITING_FOR_PODS, "no container has been started"
    if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == ROLE_ROUTER:
        return Reason.STARTING_ROUTER, "the router is starting"
    return Reason.LOADING_MODEL, "the engine is loading the model"


def _pod_condition(pod: KubeObject, name: str) -> dict[str, str]:
    conditions = pod.get("status", {}).get("conditions", [])
    return next((condition for condition in conditions if condition["type"] == name), {})
