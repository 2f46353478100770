"""A group as the cluster's objects show it: its StatefulSet or LeaderWorkerSet, its pods and its record; and which
groups a revision is to have."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count

from kvasir_operator.api.labels import GROUP_SIZE, group_index
from kvasir_operator.groups.record import RestartRecord
from kvasir_operator.kube.kinds import (
    LEADER_WORKER_SET,
    STATEFUL_SET,
    Kind,
    KubeObject,
    annotation_of,
    is_terminating,
    kind_of,
)
from kvasir_operator.observe.replicas import Replica, group_of
from kvasir_operator.observe.waiting import is_unschedulable


@dataclass(frozen=True)
class Group:
    """One replica of several pods. `obj` is what makes them; `pods` are those that exist, also on their way out."""

    obj: KubeObject
    pods: tuple[KubeObject, ...]

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def index(self) -> int:
        return group_index(self.name)

    @property
    def kind(self) -> Kind:
        return kind_of(self.obj)

    @property
    def replica(self) -> Replica:
        return Replica(self.name, self.pods)

    @property
    def record(self) -> RestartRecord:
        return RestartRecord.of(self.obj)

    @property
    def is_running(self) -> bool:
        """Not one of a former revision that is kept without pods for a rollback."""
        return self.obj["spec"].get("replicas", 1) > 0 and not is_terminating(self.obj)

    @property
    def num_on_nodes(self) -> int:
        """Of its pods."""
        return sum("nodeName" in pod.get("spec", {}) for pod in self.replica.active_pods)

    @property
    def is_partly_placed(self) -> bool:
        """Some of its pods hold nodes' room in vain, as there is none for others."""
        return self.is_running and self.num_on_nodes > 0 and any(map(is_unschedulable, self.replica.active_pods))

    @property
    def running_replicas(self) -> int:
        """`spec.replicas` of its object while it runs: a StatefulSet's pods, and the one group of a LeaderWorkerSet."""
        if self.is_leader_worker_set:
            return 1
        return int(annotation_of(self.obj, GROUP_SIZE) or self.obj["spec"].get("replicas", 1))

    @property
    def is_leader_worker_set(self) -> bool:
        """Its workers are made after its leader and, once that is gone, deleted by Kubernetes; a changed template has
        all of them made anew."""
        return self.kind == LEADER_WORKER_SET


def groups_of(objects: Iterable[KubeObject], pods: Collection[KubeObject]) -> list[Group]:
    """By index."""
    found = [Group(each, tuple(pod for pod in pods if group_of(pod) == each["metadata"]["name"])) for each in objects]
    return sorted(found, key=lambda group: group.index)


@dataclass(frozen=True)
class WantedGroup:
    """`index` tells a revision's groups apart. `avoided_nodes`: where its failures began more than once. `kind`: of its
    object."""

    index: int
    avoided_nodes: tuple[str, ...] = ()
    kind: Kind = STATEFUL_SET


def staying(groups: Iterable[Group], num_wanted: int, going: Collection[str]) -> list[Group]:
    """Of the groups that run those that run on: not those whose names are among `going`, and not more than wanted."""
    running = [group for group in groups if group.is_running]
    ordered = sorted(running, key=lambda group: (group.name in going, group.index))
    return sorted(ordered[:num_wanted], key=lambda group: group.index)


def taken_apart(groups: Iterable[Group]) -> list[Group]:
    """Of partly placed groups all but the one that is nearest to being whole: it may need what they hold."""
    return sorted((group for group in groups if group.is_partly_placed), key=lambda group: -group.num_on_nodes)[1:]


def chosen_indexes(
    groups: Collection[Group], num_wanted: int, going: Collection[str], taken: Collection[int]
) -> list[int]:
    """Indexes of the groups that a revision is to have.

    `taken` have pods that are on their way out: a group of the same name would wait until those are gone.
    """
    stay = [group.index for group in staying(groups, num_wanted, going)]
    others = [group.index for group in groups if not group.is_running]
    fresh = (index for index in count() if index not in {*taken, *(group.index for group in groups)})
    free = [*(index for index in others if index not in taken), *(next(fresh) for _ in range(num_wanted))]
    return sorted([*stay, *free[: num_wanted - len(stay)]])


def kinds_by_index(groups: Iterable[Group], indexes: Iterable[int], offered: Kind) -> dict[int, Kind]:
    """Of each of `indexes`: as the group is, else as the revision's first, else what is `offered`."""
    known = {group.index: group.kind for group in groups}
    of_new = next(iter(known.values()), offered)
    return {index: known.get(index, of_new) for index in indexes}
