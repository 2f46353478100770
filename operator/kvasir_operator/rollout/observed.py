"""Workloads as the cluster's objects show them.

A Deployment of an engine role is a workload whatever its name, also one of an earlier operator, whose selector takes in
every revision: a pod belongs to its revision's own Deployment, and only without one to that.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from kvasir_operator.api.conditions import DEGRADING_REASONS, Reason, severity
from kvasir_operator.api.labels import ENGINE_ROLES, REVISION_LABEL, REVISION_NUMBER, ROLE_LABEL, TRAFFIC_WEIGHT
from kvasir_operator.apply.plan import APPLIED_HASH, controller_uid
from kvasir_operator.kube.kinds import DEPLOYMENT, SERVICE, KubeObject, is_terminating, object_key
from kvasir_operator.observe.observe import Observed
from kvasir_operator.observe.waiting import Waiting, is_ready, why_deployment_waits, why_pod_waits
from kvasir_operator.rollout.workload import Workload, WorkloadKey

_ENDED_PHASES: Final = ("Failed", "Succeeded")
# Of a pod that was ready and may be again by itself.
_PASSING: Final = (Reason.NOT_RESPONDING, Reason.NODE_NOT_READY)


@dataclass(frozen=True)
class ObservedWorkload:
    """A workload with its Deployment and its pods, those that are on their way out too."""

    workload: Workload
    deployment: KubeObject
    pods: tuple[KubeObject, ...]


def observe_workloads(observed: Observed, owner_uid: str, now: str) -> list[ObservedWorkload]:
    """Of the service with this UID; `now` is RFC 3339."""
    own = [child for child in observed.children if controller_uid(child) in (None, owner_uid)]
    deployments = [child for child in own if object_key(child).kind == DEPLOYMENT and _key(child) is not None]
    services = {child["metadata"]["name"]: child for child in own if object_key(child).kind == SERVICE}
    keys = {_key(deployment) for deployment in deployments}
    return [
        _observed_workload(deployment, observed, keys, services.get(deployment["metadata"]["name"]), now)
        for deployment in deployments
    ]


def _observed_workload(
    deployment: KubeObject,
    observed: Observed,
    keys: Collection[WorkloadKey | None],
    service: KubeObject | None,
    now: str,
) -> ObservedWorkload:
    pods = tuple(pod for pod in observed.pods if _belongs(pod, deployment, keys))
    active = [
        pod for pod in pods if not is_terminating(pod) and pod.get("status", {}).get("phase") not in _ENDED_PHASES
    ]
    waits = {
        pod["metadata"]["name"]: wait
        for pod in active
        if (wait := why_pod_waits(pod, observed.pod_events.get(pod["metadata"]["name"], ()))) is not None
    }
    key = _key(deployment)
    assert key is not None
    replicas = int(deployment["spec"].get("replicas", 1))
    workload = Workload(
        key,
        number=revision_number(deployment),
        replicas=replicas,
        num_pods=len(active),
        num_ready=0 if service is None else sum(map(is_ready, active)),  # no router finds a pod without a Service
        num_useless=sum(_is_useless(pod, waits.get(pod["metadata"]["name"])) for pod in active),
        num_leaving=sum(map(is_terminating, pods)),
        traffic_weight=None if service is None else _weight(service),
        trouble=_trouble(deployment, active, list(waits.values()), now) if replicas else None,
    )
    return ObservedWorkload(workload, deployment, pods)


def revision_number(deployment: KubeObject) -> int:
    """Its order of use; 0 where an operator made it that had one for all revisions."""
    text = deployment["metadata"].get("annotations", {}).get(REVISION_NUMBER, "")
    return int(text) if text.isdecimal() else 0


def _key(deployment: KubeObject) -> WorkloadKey | None:
    """By its template, which nobody can change without new pods; None for what holds no engine."""
    template_labels = deployment["spec"]["template"]["metadata"].get("labels", {})
    role, revision = template_labels.get(ROLE_LABEL), template_labels.get(REVISION_LABEL)
    return WorkloadKey(role, revision) if role in ENGINE_ROLES and revision is not None else None


def _belongs(pod: KubeObject, deployment: KubeObject, keys: Collection[WorkloadKey | None]) -> bool:
    pod_labels: dict[str, str] = pod["metadata"].get("labels", {})
    key = WorkloadKey(pod_labels.get(ROLE_LABEL, ""), pod_labels.get(REVISION_LABEL, ""))
    if key in keys:
        return key == _key(deployment)
    return bool(deployment["spec"]["selector"]["matchLabels"].items() <= pod_labels.items())


def _weight(service: KubeObject) -> int | None:
    text = service["metadata"].get("labels", {}).get(TRAFFIC_WEIGHT)
    if text is not None and text.isdecimal():
        return int(text)
    return None if APPLIED_HASH in service["metadata"].get("annotations", {}) else 0  # see plan.Unweigh


def _is_useless(pod: KubeObject, wait: Waiting | None) -> bool:
    """It fails, or was never ready: one that was ready once may be so again by itself."""
    if wait is None:
        return False
    has_run = any(each.get("restartCount") for each in pod.get("status", {}).get("containerStatuses", []))
    return wait.reason in DEGRADING_REASONS or (wait.reason not in _PASSING and not has_run)


def _trouble(deployment: KubeObject, active: Sequence[KubeObject], waits: Sequence[Waiting], now: str) -> str | None:
    """Why its pods do not become ready, where waiting alone seldom mends it."""
    refused = why_deployment_waits(deployment)
    degrading = [wait for wait in (*waits, *([] if refused is None else [refused])) if wait.reason in DEGRADING_REASONS]
    if degrading:
        return min(degrading, key=lambda wait: severity(wait.reason)).message
    deadline = deployment["spec"].get("progressDeadlineSeconds")
    if deadline is None or not active or any(map(is_ready, active)):
        return None
    waited = max(_age_seconds(pod, now) for pod in active)
    return f"{deployment['metadata']['name']}: no pod became ready within {deadline} s" if waited > deadline else None


def _age_seconds(pod: KubeObject, now: str) -> float:
    made = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    return (datetime.fromisoformat(now) - made).total_seconds()
