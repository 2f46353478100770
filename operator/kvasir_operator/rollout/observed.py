"""Workloads as the cluster's objects show them.

A Deployment of an engine role is a workload whatever its name. A role's groups of one revision, StatefulSets or
LeaderWorkerSets, are a workload together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvasir_operator.api.conditions import DEGRADING_REASONS, Reason, severity
from kvasir_operator.api.labels import (
    ENGINE_ROLES,
    GROUP_LABEL,
    REVISION_LABEL,
    REVISION_NUMBER,
    ROLE_LABEL,
    SERVICE_LABEL,
    TRAFFIC_WEIGHT,
    workload_name,
)
from kvasir_operator.apply.plan import APPLIED_HASH, controller_uid
from kvasir_operator.groups.group import Group, groups_of
from kvasir_operator.groups.restart import why_group_fails
from kvasir_operator.kube.kinds import (
    DEPLOYMENT,
    GROUP_KINDS,
    SERVICE,
    STATEFUL_SET,
    WORKLOAD_KINDS,
    KubeObject,
    ObjectKey,
    annotation_of,
    is_terminating,
    label_of,
    object_key,
    pod_template,
    seconds_between,
)
from kvasir_operator.observe.containers import num_restarts, own_containers
from kvasir_operator.observe.model_loader import engine_waits_since
from kvasir_operator.observe.observe import Observed
from kvasir_operator.observe.replicas import Replica, replicas_of
from kvasir_operator.observe.waiting import Waiting, has_been_ready, why_deployment_waits, why_pod_waits
from kvasir_operator.rollout.workload import Workload, WorkloadKey

# Of a pod that was ready and may be again by itself.
_PASSING: Final = (Reason.NOT_RESPONDING, Reason.NODE_NOT_READY)


@dataclass(frozen=True)
class ObservedWorkload:
    """A workload with its Deployment, or its groups' objects, and its pods, those that are on their way out too."""

    workload: Workload
    objects: tuple[KubeObject, ...]
    pods: tuple[KubeObject, ...]

    @property
    def deployment(self) -> KubeObject | None:
        """None where each replica is a group of its own."""
        return next((each for each in self.objects if object_key(each).kind == DEPLOYMENT), None)

    @property
    def groups(self) -> list[Group]:
        """By index; none where pods are replicas by themselves."""
        return groups_of((each for each in self.objects if object_key(each).kind in GROUP_KINDS), self.pods)

    @property
    def replicas(self) -> list[Replica]:
        """Those that have a pod."""
        return replicas_of(self.pods)

    @property
    def keys(self) -> list[ObjectKey]:
        return list(map(object_key, self.objects))

    @property
    def service_name(self) -> str:
        """Of the Service by which routers find its pods."""
        return _service_name(self.objects[0])

    @property
    def service_names(self) -> frozenset[str]:
        """That one, and the one by which pods of groups find one another."""
        rendezvous = {each["spec"]["serviceName"] for each in self.objects if object_key(each).kind == STATEFUL_SET}
        return frozenset({self.service_name, *rendezvous})


def observe_workloads(observed: Observed, owner_uid: str, now: str) -> list[ObservedWorkload]:
    """Of the service with this UID; `now` is RFC 3339."""
    own = [child for child in observed.children if controller_uid(child) in (None, owner_uid)]
    services = {child["metadata"]["name"]: child for child in own if object_key(child).kind == SERVICE}
    return [
        _observed_workload(objects, observed, services.get(_service_name(objects[0])), now)
        for objects in _by_workload(own)
    ]


def _by_workload(children: Iterable[KubeObject]) -> list[tuple[KubeObject, ...]]:
    """Each Deployment of engines by itself, and the groups by role and revision."""
    deployments: list[tuple[KubeObject, ...]] = []
    groups: dict[WorkloadKey, tuple[KubeObject, ...]] = {}
    for child in children:
        kind = object_key(child).kind
        if kind not in WORKLOAD_KINDS or (key := _key(child)) is None:
            continue
        if kind == DEPLOYMENT:
            deployments.append((child,))
        elif label_of(pod_template(child), GROUP_LABEL) == child["metadata"]["name"]:
            groups[key] = (*groups.get(key, ()), child)
    return [*deployments, *groups.values()]


def _observed_workload(
    objects: tuple[KubeObject, ...],
    observed: Observed,
    service: KubeObject | None,
    now: str,
) -> ObservedWorkload:
    key = _key(objects[0])
    assert key is not None
    pods = tuple(pod for pod in observed.pods if (label_of(pod, ROLE_LABEL), label_of(pod, REVISION_LABEL)) == key)
    replicas = replicas_of(pods)
    active = [each for each in replicas if each.is_active]
    waits = {
        pod["metadata"]["name"]: wait
        for replica in active
        for pod in replica.active_pods
        if (wait := _why_waits(pod, observed)) is not None
    }
    num_wanted = num_replicas(objects)
    workload = Workload(
        key,
        number=max(map(revision_number, objects)),
        replicas=num_wanted,
        num_pods=len(active),
        num_ready=0 if service is None else sum(each.is_ready for each in active),  # no router finds it without one
        num_useless=sum(_is_useless(each, waits) for each in active),
        num_unbound=sum(_is_unbound(each) for each in active),
        num_leaving=sum(_is_leaving(each) for each in replicas),
        traffic_weight=None if service is None else _weight(service),
    )
    found = ObservedWorkload(workload, objects, pods)
    trouble = _trouble(found, list(waits.values()), now) if num_wanted else None
    return replace(found, workload=replace(workload, trouble=trouble))


def lost_workloads(
    pods: Iterable[KubeObject], workloads: Iterable[ObservedWorkload], revision: str, since: str
) -> list[Waiting]:
    """Of former revisions, while their pods go: whoever deletes one takes its template away.

    `revision`: the current one. `since`: when the service was created, as pods may be of one before it.
    """
    former = [pod for pod in pods if _is_of_former(pod, revision, since)]
    if not former:
        return []
    held = {pod["metadata"]["name"] for each in workloads for pod in each.pods if _is_held(pod, each)}
    lost = {_own_name(pod["metadata"]["labels"]) for pod in former if pod["metadata"]["name"] not in held}
    again = (
        "of a former revision was deleted, and cannot be made again: for its pods, apply the spec that it was made from"
    )
    return [Waiting(Reason.WORKLOAD_DELETED, f"{', '.join(sorted(lost))} {again}")] if lost else []


def _is_of_former(pod: KubeObject, revision: str, since: str) -> bool:
    is_former = label_of(pod, REVISION_LABEL) not in (None, revision)
    return is_former and label_of(pod, ROLE_LABEL) in ENGINE_ROLES and pod["metadata"]["creationTimestamp"] >= since


def _is_held(pod: KubeObject, workload: ObservedWorkload) -> bool:
    """Whether what makes the pod, of a group the object of its own, is there to stay."""
    group = label_of(pod, GROUP_LABEL)
    return any(group in (None, obj["metadata"]["name"]) and not is_terminating(obj) for obj in workload.objects)


def _own_name(pod_labels: Mapping[str, str]) -> str:
    """Of the object that makes the pod."""
    name = workload_name(pod_labels[SERVICE_LABEL], pod_labels[ROLE_LABEL], pod_labels[REVISION_LABEL])
    return pod_labels.get(GROUP_LABEL, name)


def num_replicas(objects: Iterable[KubeObject]) -> int:
    """Which a Deployment, or the groups of a role's revision, are to have."""
    return sum(_num_replicas(each) for each in objects)


def _num_replicas(obj: KubeObject) -> int:
    number = int(obj["spec"].get("replicas", 1))
    return number if object_key(obj).kind == DEPLOYMENT else int(number > 0 and not is_terminating(obj))


def revision_number(workload: KubeObject) -> int:
    """Its order of use; 0 where somebody took that away."""
    text = annotation_of(workload, REVISION_NUMBER) or ""
    return int(text) if text.isdecimal() else 0


def _key(workload: KubeObject) -> WorkloadKey | None:
    """By its template, which nobody can change without new pods; None for what holds no engine."""
    role, revision = (label_of(pod_template(workload), name) for name in (ROLE_LABEL, REVISION_LABEL))
    return WorkloadKey(role, revision) if role in ENGINE_ROLES and revision is not None else None


def _service_name(workload: KubeObject) -> str:
    """Of the Service by which routers find its pods: a Deployment's has its name."""
    if object_key(workload).kind == DEPLOYMENT:
        return str(workload["metadata"]["name"])
    own_labels = pod_template(workload)["metadata"]["labels"]
    return workload_name(own_labels[SERVICE_LABEL], own_labels[ROLE_LABEL], own_labels[REVISION_LABEL])


def _weight(service: KubeObject) -> int | None:
    """By its annotation, or by its label where somebody took that away."""
    for text in (annotation_of(service, TRAFFIC_WEIGHT), label_of(service, TRAFFIC_WEIGHT)):
        if text is not None and text.isdecimal():
            return int(text)
    return 0 if annotation_of(service, APPLIED_HASH) is None else None  # see plan.Edit.without_weight


def _why_waits(pod: KubeObject, observed: Observed) -> Waiting | None:
    name = pod["metadata"]["name"]
    return why_pod_waits(pod, observed.pod_events.get(name, ()), observed.downloads.get(name))


def _is_leaving(replica: Replica) -> bool:
    return any(map(is_terminating, replica.pods)) and not replica.is_active


def _is_unbound(replica: Replica) -> bool:
    """No node has any of its pods."""
    return not any(pod.get("spec", {}).get("nodeName") for pod in replica.pods)


def _is_useless(replica: Replica, waits: Mapping[str, Waiting]) -> bool:
    """One of its pods fails, or was never ready: one that was ready once may be so again by itself."""
    if replica.is_ready:
        return False
    return any(_is_pod_useless(pod, waits.get(pod["metadata"]["name"])) for pod in replica.active_pods)


def _is_pod_useless(pod: KubeObject, wait: Waiting | None) -> bool:
    if wait is None:
        return False
    own = own_containers(pod)
    if any(has_been_ready(pod, each) for each in own):
        return False
    has_run = num_restarts(own) > 0
    return wait.reason in DEGRADING_REASONS or (wait.reason not in _PASSING and not has_run)


def _trouble(observed: ObservedWorkload, waits: Sequence[Waiting], now: str) -> str | None:
    """Why its pods do not become ready, where waiting alone seldom mends it."""
    refused = (why_deployment_waits(each) for each in observed.objects)
    failing = (why_group_fails(group, now) for group in observed.groups)
    found = [*waits, *(wait for wait in (*refused, *failing) if wait is not None)]
    degrading = [wait for wait in found if wait.reason in DEGRADING_REASONS]
    if degrading:
        return min(degrading, key=lambda wait: severity(wait.reason)).message
    active = [replica for replica in observed.replicas if replica.is_active]
    deadline = _deadline_seconds(observed.objects[0])
    if deadline is None or not active or any(replica.is_ready for replica in active):
        return None
    waited = [_waited_seconds(pod, now) for replica in active for pod in replica.active_pods]
    if max(waited) <= deadline:
        return None
    return f"{_service_name(observed.objects[0])}: no pod became ready within {deadline} s"


def _deadline_seconds(workload: KubeObject) -> int | None:
    """A Deployment says it; a group has no such field, and its pods' startup probe says the same."""
    if object_key(workload).kind == DEPLOYMENT:
        deadline: int | None = workload["spec"].get("progressDeadlineSeconds")
        return deadline
    probe = pod_template(workload)["spec"]["containers"][0]["startupProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def _waited_seconds(pod: KubeObject, now: str) -> float:
    """For the engine alone: a download takes what it takes."""
    since = engine_waits_since(pod)
    return 0.0 if since is None else seconds_between(since, now)
