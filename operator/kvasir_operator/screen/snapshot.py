"""What the screen shows, as it was read: the service with its status, its revisions and its Events."""

from dataclasses import dataclass

from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.rollout.workload import Workload


@dataclass(frozen=True)
class Snapshot:
    """One moment of a service."""

    service: KubeObject
    version: int
    """Resource version of the list that the service was read from: a watch goes on from there."""
    workloads: tuple[Workload, ...] = ()
    """Every role's revisions, those that are kept at zero for a rollback too."""
    events: tuple[KubeObject, ...] = ()
    """About the service itself, in no order."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""
