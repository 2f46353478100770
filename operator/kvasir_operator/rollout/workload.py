"""What a rollout knows of the pods: a workload is one role's pods of one revision, behind one Deployment.

Where a replica is a group of pods, behind an object of its own, "pod" stands for the group in all of this folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

RoleName = str
RevisionName = str


class WorkloadKey(NamedTuple):
    """Names one workload of a service."""

    role: RoleName
    revision: RevisionName


@dataclass(frozen=True)
class Workload:
    """One workload as it was observed.

    number: order of use of its revision, the current one's the highest.
    replicas: what its Deployment asks for.
    num_pods: pods that exist and are not going.
    num_ready: of these, those that take requests.
    num_useless: of these, those that fail or have never been ready: without them nothing is served less.
    num_unbound: of the useless ones, those that no node has: they hold no accelerator, and are gone as soon as deleted.
    num_leaving: pods that are going and finish their requests.
    traffic_weight: per cent of the requests, where its Service says so; 0 where that was taken off a canary.
    trouble: why its pods do not become ready, where waiting alone seldom mends that.
    """

    key: WorkloadKey
    number: int = 0
    replicas: int = 0
    num_pods: int = 0
    num_ready: int = 0
    num_useless: int = 0
    num_unbound: int = 0
    num_leaving: int = 0
    traffic_weight: int | None = None
    trouble: str | None = None

    @property
    def num_held(self) -> int:
        """Pods that take room: those that exist, and those that are about to be made."""
        return max(self.replicas, self.num_pods)

    @property
    def has_only_unbound_pods(self) -> bool:
        """So that at zero nothing is left of it at once; pods that are not made yet may be on a node by then."""
        return self.num_held == self.num_unbound and not self.num_leaving

    @property
    def num_expendable(self) -> int:
        """Replicas without which nothing is served less, useless pods and those that are not made yet."""
        return max(0, self.replicas - (self.num_pods - self.num_useless))

    @property
    def is_idle(self) -> bool:
        """Nothing is left of it but its Deployment."""
        return self.replicas == self.num_pods == self.num_leaving == 0


@dataclass(frozen=True)
class Fleet:
    """A service's workloads: of the current revision one a role of the spec, and all of former revisions.

    idle_roles: roles of the spec that want no pods.
    """

    revision: RevisionName
    current: Mapping[RoleName, Workload]
    former: Sequence[Workload]
    idle_roles: frozenset[RoleName] = frozenset()

    def former_of(self, role: RoleName) -> list[Workload]:
        """In the order in which pods are taken away: those of the revision that serves least first, then the oldest."""
        return sorted((each for each in self.former if each.key.role == role), key=self._worth)

    def available(self, workload: Workload) -> int:
        """Pods that serve: none where another role of the same revision has none that is ready.

        Pods of different revisions never exchange KV blocks, so prefill without decode is of no use. A Deployment that
        just shrank removes pods that are not ready first.
        """
        all_workloads = (*self.current.values(), *self.former)
        alike = [each for each in all_workloads if each.key.revision == workload.key.revision]
        is_whole = all(each.num_ready for each in alike if each.key.role not in self.idle_roles)
        return min(workload.num_ready, workload.replicas) if is_whole else 0

    @property
    def has_former_pods(self) -> bool:
        """Whether pods of former revisions exist, or are about to."""
        return any(each.num_held for each in self.former)

    def _worth(self, workload: Workload) -> tuple[int, int]:
        alike = (each for each in self.former if each.key.revision == workload.key.revision)
        return sum(map(self.available, alike)), workload.number


def make_fleet(revision: RevisionName, desired: Mapping[RoleName, int], workloads: Sequence[Workload]) -> Fleet:
    """`desired`: pods by role of the spec. A workload that is not there yet counts as an empty one."""
    by_key = {each.key: each for each in workloads}
    keys = [WorkloadKey(role, revision) for role in desired]
    current = {key.role: by_key.get(key) or Workload(key) for key in keys}
    former = [each for each in workloads if each.key not in keys]
    return Fleet(revision, current, former, frozenset(role for role, wanted in desired.items() if wanted == 0))
