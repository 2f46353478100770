"""When the pods of a group are deleted together: decided from the group's pods and its record alone.

A rank that fails ends all others, but their containers would come back one by one, each after its own back-off, and on
the node that may be the cause. So the pods are made anew at once: the first time immediately, then after growing waits,
and within an hour so often and no more. A pod that is told to go, by a node's drain for instance, takes the others
along, which finish their requests together.

Of a LeaderWorkerSet the leader is deleted in the foreground, so that Kubernetes makes no worker for it any more, and
makes the next leader once all are gone. What happens to the workers of a leader that is on its way out is Kubernetes'.

What of all this a person should know, the problems at the end say.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import LEADER_WORKER_SET_LABEL
from kvasir_operator.apply.plan import PodDeletion, Restart
from kvasir_operator.groups.group import Group
from kvasir_operator.groups.record import FORGET_SECONDS, RESTARTS, RestartRecord
from kvasir_operator.kube.kinds import (
    LEADER_WORKER_SET,
    Kind,
    KubeObject,
    annotation_of,
    is_terminating,
    label_of,
    object_key,
    pod_template,
    seconds_between,
)
from kvasir_operator.observe.containers import last_end, last_termination, own_containers
from kvasir_operator.observe.waiting import Waiting, has_been_ready
from kvasir_operator.queue.back_off import BackOff

# Of a pod template, by `kubectl rollout restart`.
RESTARTED_AT: Final = "kubectl.kubernetes.io/restartedAt"
MAX_RESTARTS: Final = 6
BACK_OFF: Final = BackOff(first_seconds=10.0, longest_seconds=300.0)
# Of a group that has failed: there is nothing left to finish. A container that has just come back in its place hears no
# SIGTERM while it starts, and within a longer grace the next group would meet it, and fail when it goes.
_GRACE_SECONDS: Final = 1
# After its grace a kubelet kills a pod within seconds: this one's does not report any more.
_LOST_SECONDS: Final = 60.0


@dataclass(frozen=True)
class RestartDecision:
    """`restart`: what to do now. `retry_seconds`: decide again then; None leaves it to the pods' events."""

    restart: Restart | None = None
    retry_seconds: float | None = None


@dataclass(frozen=True)
class _Failure:
    """`began_at`: RFC 3339, empty where nothing says."""

    began_at: str
    pod: KubeObject
    message: str


def decide_restart(group: Group, now: str) -> RestartDecision:
    """`group` is one that is to run on."""
    if pods := _lost_pods(group, now):
        return RestartDecision(_restart(group, pods, "its restart is completed"))
    if _waits_for_leader(group):
        return RestartDecision(retry_seconds=_next_look(group, now))
    if pods := _of_unfinished_restart(group):
        return RestartDecision(_restart(group, pods, "its restart is completed"))
    if others := _left_behind(group):
        leaving = ", ".join(pod["metadata"]["name"] for pod in group.pods if is_terminating(pod))
        message = f"pod {leaving} was told to go, and so the others"
        return RestartDecision(_restart(group, _deletions(group, others), message), _next_look(group, now))
    failure = _first_failure(pod for pod in group.replica.active_pods if not _is_of_former_leader(group, pod))
    if failure is None:
        return RestartDecision(retry_seconds=_next_look(group, now))
    record = group.record.current(now)
    wait_seconds = _wait_seconds(record, now)
    if wait_seconds > 0:
        return RestartDecision(retry_seconds=wait_seconds)
    deletions = _deletions(group, group.replica.active_pods, _GRACE_SECONDS)
    uids = [pod["metadata"]["uid"] for pod in group.replica.active_pods]
    # Where others have no node yet, the failure is that of waiting for them, and no node's.
    is_whole = group.num_on_nodes == len(group.replica.active_pods)
    node = failure.pod.get("spec", {}).get("nodeName") if is_whole else None
    after = record.restarted(now, failure.message, node, uids)
    return RestartDecision(_restart(group, deletions, failure.message, {RESTARTS: after.text()}))


def restart_asked_for(groups: Collection[Group]) -> Group | None:
    """The next of a role's groups whose pods `kubectl rollout restart` is to make anew: one that serves goes only while
    all others do."""
    asked = [group for group in groups if _is_restart_asked_for(group)]
    unready = [group for group in groups if not group.replica.is_ready]
    return next((group for group in asked if group in unready or not unready), None)


def _is_restart_asked_for(group: Group) -> bool:
    """A StatefulSet that makes no pod anew by itself has been given another template than that of its pods."""
    if group.is_leader_worker_set:
        return False
    at = annotation_of(pod_template(group.obj), RESTARTED_AT)
    pods = group.replica.active_pods
    return at is not None and any(annotation_of(pod, RESTARTED_AT) != at for pod in pods)


def restart_gracefully(group: Group) -> RestartDecision:
    """Its pods finish their requests first."""
    return RestartDecision(_restart(group, _deletions(group, group.replica.active_pods), "kubectl rollout restart"))


def take_apart(group: Group) -> RestartDecision:
    """Its object goes in the same pass, so that no pod comes back before there is room for all."""
    cause = "it and another group had nodes for a part of their pods each; it comes back once the other is whole"
    return RestartDecision(_restart(group, _deletions(group, group.replica.active_pods, _GRACE_SECONDS), cause))


def record_after(group: Group, decision: RestartDecision) -> RestartRecord:
    """What the group's record says once `decision` is carried out."""
    if decision.restart is None or RESTARTS not in decision.restart.annotations:
        return group.record
    metadata = {"metadata": {"annotations": decision.restart.annotations}}
    return RestartRecord.of(metadata)


def _restart(
    group: Group, pods: Sequence[PodDeletion], cause: str, annotations: Mapping[str, str] | None = None
) -> Restart:
    return Restart(object_key(group.obj), str(group.obj["metadata"]["uid"]), tuple(pods), cause, annotations or {})


def _lost_pods(group: Group, now: str) -> list[PodDeletion]:
    """Pods whose node does not end them: the group gets no others before they are gone."""
    return [
        _deletion(pod, 0) for pod in group.pods if is_terminating(pod) and _overdue_seconds(pod, now) > _LOST_SECONDS
    ]


def _waits_for_leader(group: Group) -> bool:
    """Its leader is on its way out, or not made yet: until it is, its workers are nobody's to delete."""
    return group.is_leader_worker_set and group.replica.leader not in group.replica.active_pods


def _of_unfinished_restart(group: Group) -> list[PodDeletion]:
    """Pods of the last restart, which was recorded and not carried out to the end."""
    old = [pod for pod in group.replica.active_pods if pod["metadata"]["uid"] in group.record.pods]
    return _deletions(group, old, _GRACE_SECONDS)


def _next_look(group: Group, now: str) -> float | None:
    """When pods that are on their way out would be lost."""
    leaving = [pod for pod in group.pods if is_terminating(pod)]
    return min((_LOST_SECONDS - _overdue_seconds(pod, now) + 1.0 for pod in leaving), default=None)


def _overdue_seconds(pod: KubeObject, now: str) -> float:
    """Below 0 within its grace."""
    return seconds_between(pod["metadata"]["deletionTimestamp"], now)


def _left_behind(group: Group) -> list[KubeObject]:
    """Pods that were there when another was told to go. Successors wait for it, and stay.

    To the second, which is all that is known: a successor made within the same one is made once more.
    """
    leaving = [pod for pod in group.pods if is_terminating(pod) and not _is_of_former_leader(group, pod)]
    told = [_told_at(pod) for pod in leaving]
    return [pod for pod in group.replica.active_pods if any(_made_at(pod).timestamp() <= each for each in told)]


def _is_of_former_leader(group: Group, pod: KubeObject) -> bool:
    """A worker that ends because its leader has gone, by when the next one may be there: Kubernetes deletes it."""
    leader = group.replica.leader
    return group.is_leader_worker_set and leader is not None and _made_at(pod) < _made_at(leader)


def _told_at(pod: KubeObject) -> float:
    metadata = pod["metadata"]
    ends_at = datetime.fromisoformat(metadata["deletionTimestamp"]).timestamp()
    return ends_at - float(metadata.get("deletionGracePeriodSeconds", 0))


def _made_at(pod: KubeObject) -> datetime:
    return datetime.fromisoformat(pod["metadata"]["creationTimestamp"])


def _first_failure(pods: Iterable[KubeObject]) -> _Failure | None:
    """Which the others follow."""
    failures = [failure for pod in pods if (failure := _failure_of(pod)) is not None]
    return min(failures, key=lambda failure: (failure.began_at or "9", failure.pod["metadata"]["name"]), default=None)


def _failure_of(pod: KubeObject) -> _Failure | None:
    for container in own_containers(pod):
        if _is_failed(pod, container):
            message = f"pod {pod['metadata']['name']}: container {container['name']} {last_end(container)}"
            return _Failure(last_termination(container).get("finishedAt") or "", pod, message)
    return None


def _is_failed(pod: KubeObject, container: KubeObject) -> bool:
    """It has ended since it was ready last."""
    state = container.get("state", {})
    if "terminated" in state:
        return True
    is_back = container.get("ready") or ("running" in state and has_been_ready(pod, container))
    return bool(container.get("restartCount")) and not is_back


def _wait_seconds(record: RestartRecord, now: str) -> float:
    """Until the group may be restarted again; 0 or less: now."""
    if record.last is None:
        return 0.0
    is_exhausted = record.num_restarts >= MAX_RESTARTS
    pause = FORGET_SECONDS if is_exhausted else BACK_OFF.delay_seconds(record.num_restarts)
    return pause - seconds_between(record.last, now)


def _deletion(pod: KubeObject, grace_seconds: int | None = None, *, is_foreground: bool = False) -> PodDeletion:
    return PodDeletion(pod["metadata"]["name"], pod["metadata"]["uid"], grace_seconds, is_foreground)


def _deletions(group: Group, pods: Iterable[KubeObject], grace_seconds: int | None = None) -> list[PodDeletion]:
    """The leader of a LeaderWorkerSet first, and in the foreground."""
    leader = group.replica.leader if group.is_leader_worker_set else None
    ordered = sorted(pods, key=lambda pod: pod is not leader)
    return [_deletion(pod, grace_seconds, is_foreground=pod is leader) for pod in ordered]


def group_problems(groups: Iterable[Group], now: str) -> list[Waiting]:
    """Of groups that were restarted within the last hour."""
    return [problem for group in groups if group.is_running for problem in _problems(group, now)]


def why_group_fails(group: Group, now: str) -> Waiting | None:
    """None for one that has recovered, or never failed."""
    record = group.record.current(now)
    if record.num_restarts == 0 or group.replica.is_ready:
        return None
    is_exhausted = record.num_restarts >= MAX_RESTARTS
    reason = Reason.GROUP_RESTARTS_EXHAUSTED if is_exhausted else Reason.GROUP_RESTARTED
    return Waiting(reason, f"group {group.name} {_history(record)}: {record.cause}")


def removed_sets(pods: Iterable[KubeObject], group_kind: Kind) -> list[Waiting]:
    """Pods of LeaderWorkerSets where the cluster has none any more. `group_kind`: what it has for groups."""
    names = {name for pod in pods if (name := label_of(pod, LEADER_WORKER_SET_LABEL)) is not None}
    if group_kind == LEADER_WORKER_SET or not names:
        return []
    gone = ", ".join(sorted(names))
    message = f"the CRD of LeaderWorkerSets was removed, and with it {gone}: StatefulSets take their place"
    return [Waiting(Reason.LEADER_WORKER_SETS_REMOVED, message)]


def _problems(group: Group, now: str) -> Iterator[Waiting]:
    if (failing := why_group_fails(group, now)) is not None:
        yield failing
    record = group.record.current(now)
    for node in record.avoided_nodes:
        failures = f"failures began there {record.nodes[node]} times: look at its devices and its log"
        yield Waiting(Reason.NODE_AVOIDED, f"group {group.name} avoids node {node}, {failures}")


def _history(record: RestartRecord) -> str:
    if record.num_restarts >= MAX_RESTARTS:
        return (
            f"was restarted {record.num_restarts} times in a row, and is left alone for {FORGET_SECONDS / 60:.0f} min"
        )
    pause = BACK_OFF.delay_seconds(record.num_restarts)
    return f"was restarted {record.num_restarts} times in a row, and may be again {pause:g} s after the last"
