"""A group as the cluster's objects show it: its StatefulSet or LeaderWorkerSet, its pods and its record."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvasir_operator.api.labels import GROUP_SIZE, group_index
from kvasir_operator.groups.record import RestartRecord
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, Kind, KubeObject, is_terminating, kind_of
from kvasir_operator.observe.replicas import Replica, group_of


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
    def running_replicas(self) -> int:
        """`spec.replicas` of its object while it runs: a StatefulSet's pods, and the one group of a LeaderWorkerSet."""
        if self.is_leader_worker_set:
            return 1
        annotations = self.obj["metadata"].get("annotations", {})
        return int(annotations.get(GROUP_SIZE) or self.obj["spec"].get("replicas", 1))

    @property
    def is_leader_worker_set(self) -> bool:
        """Its workers are made after its leader and, once that is gone, deleted by Kubernetes; a changed template has
        all of them made anew."""
        return self.kind == LEADER_WORKER_SET


def groups_of(objects: Iterable[KubeObject], pods: Collection[KubeObject]) -> list[Group]:
    """By index."""
    found = [Group(each, tuple(pod for pod in pods if group_of(pod) == each["metadata"]["name"])) for each in objects]
    return sorted(found, key=lambda group: group.index)
