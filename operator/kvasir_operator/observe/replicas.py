"""Pods as replicas: a pod by itself, or the pods of one group, of which rank 0 takes requests for all.

A group is ready when its rank 0 is: that one is not before all ranks have loaded, nor once any of them is lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvasir_operator.api.labels import GROUP_LABEL, RANK_LABEL, ROLE_LABEL
from kvasir_operator.kube.kinds import KubeObject, is_terminating, label_of
from kvasir_operator.observe.waiting import has_ended
from kvasir_operator.observe.waiting import is_ready as is_pod_ready


@dataclass(frozen=True)
class Replica:
    """`name` is the pod's, or the group's; `pods` are those that exist, some of them perhaps on their way out."""

    name: str
    pods: tuple[KubeObject, ...]

    @property
    def leader(self) -> KubeObject | None:
        """The pod that takes requests; None where it does not exist."""
        return next((pod for pod in self.pods if label_of(pod, RANK_LABEL) in (None, "0")), None)

    @property
    def is_ready(self) -> bool:
        return self.leader is not None and is_pod_ready(self.leader)

    @property
    def active_pods(self) -> tuple[KubeObject, ...]:
        """Those that are neither on their way out nor given up."""
        return tuple(pod for pod in self.pods if not is_terminating(pod) and not has_ended(pod))

    @property
    def is_leaving(self) -> bool:
        """The pod that takes its requests is on its way out; without one, all that is left of it."""
        return all(map(is_terminating, self.pods if self.leader is None else (self.leader,)))

    @property
    def is_active(self) -> bool:
        """It is there, or about to be, and not leaving."""
        return bool(self.active_pods) and not self.is_leaving


@dataclass(frozen=True)
class EngineContext:
    """Tokens of one request, prompt and answer together, that an engine takes.

    cut_from: what its model takes, where the engine's memory holds no request so long; None: all of that.
    """

    num_tokens: int
    cut_from: int | None = None


def replicas_of(pods: Iterable[KubeObject]) -> list[Replica]:
    """In the order in which each one's first pod comes."""
    by_name: dict[str, list[KubeObject]] = {}
    for pod in pods:
        by_name.setdefault(group_of(pod) or str(pod["metadata"]["name"]), []).append(pod)
    return [Replica(name, tuple(own)) for name, own in by_name.items()]


def group_of(pod: KubeObject) -> str | None:
    """None for a pod that is a replica by itself."""
    return label_of(pod, GROUP_LABEL)


def of_role(pods: Iterable[KubeObject], role: str) -> list[KubeObject]:
    return [pod for pod in pods if label_of(pod, ROLE_LABEL) == role]
