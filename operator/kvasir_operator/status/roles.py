"""What one role's workloads and pods come to: counts of replicas, and the worst that keeps one from being ready.

A replica is a pod of a Deployment, or all pods of a StatefulSet or LeaderWorkerSet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvasir_operator.api.conditions import Reason, severity
from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL, ROLE_ROUTER, ROLES
from kvasir_operator.kube.kinds import (
    DEPLOYMENT,
    LEADER_WORKER_SET,
    KubeObject,
    is_terminating,
    label_of,
    object_key,
    pod_template,
)
from kvasir_operator.observe.model_loader import DownloadProgress
from kvasir_operator.observe.replicas import of_role, replicas_of
from kvasir_operator.observe.waiting import Waiting, why_deployment_waits, why_pod_waits, why_pods_ended

_NO_EVENTS: Mapping[str, Sequence[KubeObject]] = MappingProxyType({})
_NO_DOWNLOADS: Mapping[str, DownloadProgress] = MappingProxyType({})


@dataclass(frozen=True)
class RoleState:
    """One role; counts are of replicas, `ready` of those of every revision."""

    role: str
    desired: int
    """Wanted, over all revisions."""
    ready: int
    draining: int
    revision: str | None
    """Which they are brought to."""
    num_replicas: int
    """Those that exist and are not going."""
    num_former: int
    """Those of former revisions among these."""
    is_settled: bool
    """There are exactly the wanted ones, all of the current revision."""
    waiting: Waiting | None
    """The worst that keeps one from being ready; None when enough are."""
    has_groups: bool = False
    """Each replica is a group of pods, of which the first takes the requests."""

    @property
    def is_engine(self) -> bool:
        return self.role != ROLE_ROUTER

    @property
    def is_ready(self) -> bool:
        """Fully staffed, whatever the revision."""
        return self.ready >= self.desired


def role_of(workload: KubeObject) -> str | None:
    """By its template, whose labels its selector holds; None for a workload that has no pods of ours."""
    role = label_of(pod_template(workload), ROLE_LABEL)
    return role if role in ROLES else None


def role_state(
    workloads: Sequence[KubeObject],
    desired: int,
    pods: Iterable[KubeObject],
    pod_events: Mapping[str, Sequence[KubeObject]] = _NO_EVENTS,
    downloads: Mapping[str, DownloadProgress] = _NO_DOWNLOADS,
) -> RoleState:
    """`workloads` of one role, the current revision's first: it may be a desired object that the API server refused.

    `desired`: replicas wanted, over all revisions. `pod_events` are the Events by name of the pod that they are about,
    `downloads` what its loader says by name of the pod.
    """
    template = pod_template(workloads[0])
    role, revision = template["metadata"]["labels"][ROLE_LABEL], label_of(template, REVISION_LABEL)
    own = of_role(pods, role)
    replicas = replicas_of(own)
    ready = [replica for replica in replicas if replica.is_ready]
    current = [each for each in workloads if label_of(pod_template(each), REVISION_LABEL) == revision]
    num_replicas, num_current = sum(map(_num_replicas, workloads)), sum(map(_num_updated, current))
    is_settled = all(map(_is_seen, current)) and num_replicas == num_current == desired
    is_enough = len(ready) >= desired and is_settled
    return RoleState(
        role=role,
        desired=desired,
        ready=len(ready),
        draining=sum(any(map(is_terminating, replica.pods)) for replica in replicas),
        revision=revision,
        num_replicas=num_replicas,
        num_former=max(0, num_replicas - num_current),
        is_settled=is_settled,
        waiting=None if is_enough else _worst_wait(current, own, pod_events, downloads, desired),
        has_groups=object_key(workloads[0]).kind != DEPLOYMENT,
    )


def idle_role(role: str, desired: int, revision: str, pods: Iterable[KubeObject]) -> RoleState:
    """Of an engine role that has no workload: groups of pods have none at zero, and before the first is made."""
    own = of_role(pods, role)
    draining = sum(any(map(is_terminating, replica.pods)) for replica in replicas_of(own))
    waiting = Waiting(Reason.WAITING_FOR_PODS, f"role {role}: no pods yet") if desired else None
    return RoleState(role, desired, 0, draining, revision, 0, 0, desired == 0, waiting)


def _num_replicas(workload: KubeObject) -> int:
    """Of a StatefulSet all pods are one; a LeaderWorkerSet counts them so itself."""
    number: int = workload.get("status", {}).get("replicas", 0)
    return number if object_key(workload).kind == DEPLOYMENT else int(number > 0)


def _num_updated(workload: KubeObject) -> int:
    """Those that are as the template says; a group's pods may be older, and are of its revision all the same."""
    if object_key(workload).kind != DEPLOYMENT:
        status = workload.get("status", {})
        num_pods: int = status.get("replicas", 0)
        return int(num_pods > 0 and num_pods == workload["spec"].get("replicas", 1))
    number: int = workload.get("status", {}).get("updatedReplicas", 0)
    return number


def _is_seen(workload: KubeObject) -> bool:
    status = workload.get("status", {})
    if status and object_key(workload).kind == LEADER_WORKER_SET and "observedGeneration" not in status:
        return True  # most releases do not say
    observed: int = status.get("observedGeneration", -1)
    generation: int = workload["metadata"].get("generation", 0)
    return observed >= generation


def _worst_wait(
    workloads: Sequence[KubeObject],
    pods: Sequence[KubeObject],
    events: Mapping[str, Sequence[KubeObject]],
    downloads: Mapping[str, DownloadProgress],
    desired: int,
) -> Waiting | None:
    """`workloads` are the current revision's, at least one."""
    # What a former revision's pods lack no longer matters once there are pods to replace them.
    revision = label_of(pod_template(workloads[0]), REVISION_LABEL)
    current = [pod for pod in pods if label_of(pod, REVISION_LABEL) == revision] or pods
    named = ((pod["metadata"]["name"], pod) for pod in current)
    pod_waits = (why_pod_waits(pod, events.get(name, ()), downloads.get(name)) for name, pod in named)
    found = (*map(why_deployment_waits, workloads), *pod_waits, why_pods_ended(current))
    waits = [wait for wait in found if wait is not None]
    if waits:
        return min(waits, key=lambda wait: severity(wait.reason))
    num_made = len(replicas_of(pods))
    if sum(replica.is_ready for replica in replicas_of(pods)) >= desired:
        return None
    key = object_key(workloads[0])
    unit = "pods" if key.kind == DEPLOYMENT else "groups of pods"
    maker = "; the controller of LeaderWorkerSets makes them, if it runs" if key.kind == LEADER_WORKER_SET else ""
    return Waiting(Reason.WAITING_FOR_PODS, f"{key}: {num_made} of {desired} {unit} made{maker}")
