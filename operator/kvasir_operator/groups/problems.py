"""What the status says of groups: how often each was restarted and why, which nodes it avoids, whose kind is gone."""

from collections.abc import Iterable, Iterator

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import LEADER_WORKER_SET_LABEL
from kvasir_operator.groups.group import Group
from kvasir_operator.groups.record import FORGET_SECONDS, RestartRecord
from kvasir_operator.groups.restart import BACK_OFF, MAX_RESTARTS
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, Kind, KubeObject
from kvasir_operator.observe.waiting import Waiting


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
    names = {pod["metadata"].get("labels", {}).get(LEADER_WORKER_SET_LABEL) for pod in pods} - {None}
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
