"""What only a pod's Events say: why the kubelet cannot make its volumes or its network.

While that fails, the pod's status says ContainerCreating, as it does while an image is pulled, and a further failure
changes nothing of the pod. So such pods, and no others, are asked for their Events, and looked at again in a while.
"""

import re
from collections.abc import Iterable, Sequence

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import MODEL_CACHE, ROLE_LABEL
from kvasir_operator.kube.kinds import KubeObject, is_terminating, label_of, seconds_between
from kvasir_operator.observe.containers import all_containers

# Reported by the kubelet once volumes and network are there: a failure before that is over.
_PROGRESS = frozenset({"Pulling", "Pulled", "Created", "Started"})
_VOLUME_FAILURES = frozenset({"FailedMount", "FailedAttachVolume"})
_FAILURES = _VOLUME_FAILURES | {"FailedCreatePodSandBox"}
# The kubelet's summary after two minutes, which no longer names the cause.
_SUMMARY = "Unable to attach or mount volumes"
_ATTACHED_ELSEWHERE = "Multi-Attach error"
_ATTACHED_ELSEWHERE_ADVICE = (
    "a ReadWriteOnce claim is attached to one node at a time, so pods on two nodes cannot have it, as in a rollout "
    "with maxSurge: use a claim that is ReadOnlyMany or ReadWriteMany, or one replica and maxSurge: 0"
)
_SECRET_NOT_FOUND = re.compile(r"\bsecrets? \"[^\"]*\" not found")
_MAX_PODS_ASKED = 3
"""Of a role: its pods are alike, and mostly wait for the same thing."""
_FIRST_LOOK_SECONDS = 3.0
_LONGEST_LOOK_SECONDS = 15.0


def is_creating(pod: KubeObject) -> bool:
    """Whether a node has the pod, and makes volumes and network for it or pulls its images."""
    causes = [each.get("state", {}).get("waiting", {}).get("reason") for each in all_containers(pod)]
    return not is_terminating(pod) and "ContainerCreating" in causes


def pods_to_ask(pods: Iterable[KubeObject]) -> list[KubeObject]:
    """Those whose Events may say more than their status: some of each role."""
    return some_of_each_role(filter(is_creating, pods), _MAX_PODS_ASKED)


def some_of_each_role(pods: Iterable[KubeObject], most: int) -> list[KubeObject]:
    by_role: dict[str | None, list[KubeObject]] = {}
    for pod in pods:
        by_role.setdefault(label_of(pod, ROLE_LABEL), []).append(pod)
    return [pod for alike in by_role.values() for pod in alike[:most]]


def look_again_seconds(pods: Iterable[KubeObject], now: str) -> float | None:
    """When to ask again, the later the longer the youngest of them has waited; None when none is to be asked."""
    ages = [seconds_between(pod["metadata"]["creationTimestamp"], now) for pod in pods if is_creating(pod)]
    return min(max(min(ages) / 2, _FIRST_LOOK_SECONDS), _LONGEST_LOOK_SECONDS) if ages else None


def why_creation_fails(events: Sequence[KubeObject]) -> tuple[Reason, str] | None:
    """`events` are one pod's; None when nothing failed, or it worked in the end."""
    last_progress = max((_reported_at(event) for event in events if event.get("reason") in _PROGRESS), default="")
    failures = [event for event in events if event.get("reason") in _FAILURES and _reported_at(event) > last_progress]
    if not failures:
        return None
    worst = max(failures, key=lambda event: (not _message(event).startswith(_SUMMARY), _reported_at(event)))
    node = worst.get("source", {}).get("host")
    return _reason(worst), f"{worst['reason']}{f' on node {node}' if node else ''}: {_message(worst)}{_advice(worst)}"


def _reason(event: KubeObject) -> Reason:
    if event["reason"] not in _VOLUME_FAILURES:
        return Reason.POD_CREATION_FAILED
    if "hostPath type check failed" in _message(event):  # of a file:// source, else of the cache
        return Reason.CACHE_UNAVAILABLE if f'"{MODEL_CACHE}"' in _message(event) else Reason.MODEL_NOT_FOUND
    return Reason.SECRET_NOT_FOUND if _SECRET_NOT_FOUND.search(_message(event)) else Reason.VOLUME_UNAVAILABLE


def _advice(event: KubeObject) -> str:
    return f" ({_ATTACHED_ELSEWHERE_ADVICE})" if _ATTACHED_ELSEWHERE in _message(event) else ""


def _message(event: KubeObject) -> str:
    return str(event.get("message") or "")


def _reported_at(event: KubeObject) -> str:
    """To the second: some reporters are no more exact."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])[:19]
