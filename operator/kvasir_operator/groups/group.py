"""A group as the cluster's objects show it: its StatefulSet, its pods and its record."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvasir_operator.api.labels import GROUP_SIZE, group_index
from kvasir_operator.groups.record import RestartRecord
from kvasir_operator.kube.kinds import KubeObject, is_terminating
from kvasir_operator.observe.replicas import Replica, group_of


@dataclass(frozen=True)
class Group:
    """One replica of several pods. `pods` are those that exist, those that are on their way out too."""

    stateful_set: KubeObject
    pods: tuple[KubeObject, ...]

    @property
    def name(self) -> str:
        return str(self.stateful_set["metadata"]["name"])

    @property
    def index(self) -> int:
        return group_index(self.name)

    @property
    def replica(self) -> Replica:
        return Replica(self.name, self.pods)

    @property
    def record(self) -> RestartRecord:
        return RestartRecord.of(self.stateful_set)

    @property
    def num_nodes(self) -> int:
        """Pods that it has while it runs."""
        annotations = self.stateful_set["metadata"].get("annotations", {})
        return int(annotations.get(GROUP_SIZE) or self.stateful_set["spec"].get("replicas", 1))

    @property
    def is_running(self) -> bool:
        """Not one of a former revision that is kept without pods for a rollback."""
        return self.stateful_set["spec"].get("replicas", 1) > 0 and not is_terminating(self.stateful_set)


def groups_of(stateful_sets: Iterable[KubeObject], pods: Collection[KubeObject]) -> list[Group]:
    """By index."""
    found = [
        Group(each, tuple(pod for pod in pods if group_of(pod) == each["metadata"]["name"])) for each in stateful_sets
    ]
    return sorted(found, key=lambda group: group.index)
