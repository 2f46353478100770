"""What one role's Deployments and pods come to: counts, and the worst that keeps a pod from being ready."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvasir_operator.api.conditions import Reason, severity
from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL, ROLE_ROUTER, ROLES
from kvasir_operator.kube.kinds import KubeObject, is_terminating
from kvasir_operator.observe.waiting import Waiting, is_ready, why_deployment_waits, why_pod_waits

_NO_EVENTS: Mapping[str, Sequence[KubeObject]] = MappingProxyType({})


@dataclass(frozen=True)
class RoleState:
    """One role; `ready` counts pods of every revision."""

    role: str
    desired: int
    """Pods wanted, over all revisions."""
    ready: int
    draining: int
    revision: str | None
    """Which the pods are brought to."""
    ready_revisions: frozenset[str | None]
    """Revisions of which a pod is ready."""
    num_pods: int
    """Pods that exist and are not going."""
    num_former: int
    """Pods of former revisions among these."""
    is_settled: bool
    """There are exactly the wanted pods, all of the current revision."""
    waiting: Waiting | None
    """The worst that keeps a pod from being ready; None when enough pods are."""

    @property
    def is_engine(self) -> bool:
        return self.role != ROLE_ROUTER

    @property
    def is_ready(self) -> bool:
        """Fully staffed, whatever the revision."""
        return self.ready >= self.desired


def role_of(deployment: KubeObject) -> str | None:
    """By its template, whose labels its selector holds; None for a Deployment that has no pods of ours."""
    role: str | None = deployment["spec"]["template"]["metadata"].get("labels", {}).get(ROLE_LABEL)
    return role if role in ROLES else None


def role_state(
    deployments: Sequence[KubeObject],
    desired: int,
    pods: Iterable[KubeObject],
    pod_events: Mapping[str, Sequence[KubeObject]] = _NO_EVENTS,
) -> RoleState:
    """`deployments` of one role, the current revision's first: it may be a desired object that the API server refused.

    `desired`: pods wanted, over all revisions. `pod_events` are the Events by name of the pod that they are about.
    """
    current = deployments[0]
    role = current["spec"]["template"]["metadata"]["labels"][ROLE_LABEL]
    own = [pod for pod in pods if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == role]
    ready = [pod for pod in own if is_ready(pod)]
    status = current.get("status", {})
    num_pods, num_current = sum(map(_num_pods, deployments)), status.get("updatedReplicas", 0)
    is_seen = status.get("observedGeneration", -1) >= current["metadata"].get("generation", 0)
    is_settled = is_seen and num_pods == num_current == desired
    return RoleState(
        role=role,
        desired=desired,
        ready=len(ready),
        draining=sum(map(is_terminating, own)),
        revision=_revision(current["spec"]["template"]),
        ready_revisions=frozenset(map(_revision, ready)),
        num_pods=num_pods,
        num_former=max(0, num_pods - num_current),
        is_settled=is_settled,
        waiting=None if len(ready) >= desired and is_settled else _worst_wait(current, own, pod_events, desired),
    )


def _num_pods(deployment: KubeObject) -> int:
    number: int = deployment.get("status", {}).get("replicas", 0)
    return number


def _revision(template_or_pod: KubeObject) -> str | None:
    revision: str | None = template_or_pod["metadata"].get("labels", {}).get(REVISION_LABEL)
    return revision


def _worst_wait(
    deployment: KubeObject, pods: Sequence[KubeObject], events: Mapping[str, Sequence[KubeObject]], desired: int
) -> Waiting | None:
    # What a former revision's pods lack no longer matters once there are pods to replace them.
    current = [pod for pod in pods if _revision(pod) == _revision(deployment["spec"]["template"])] or pods
    pod_waits = (why_pod_waits(pod, events.get(pod["metadata"]["name"], ())) for pod in current)
    waits = [wait for wait in (why_deployment_waits(deployment), *pod_waits) if wait is not None]
    if waits:
        return min(waits, key=lambda wait: severity(wait.reason))
    if sum(map(is_ready, pods)) >= desired:
        return None
    name = deployment["metadata"]["name"]
    return Waiting(Reason.WAITING_FOR_PODS, f"Deployment {name}: {len(pods)} of {desired} pods made")
