"""Which of a workload's replicas go when it shrinks: those with the least work, of equals the youngest.

The youngest have the coldest caches. Of a Deployment, Kubernetes removes the pods with the lowest pod-deletion-cost
first, so the choice is written there before the smaller number is applied. A group goes with its object. What goes
then drains by itself: SIGTERM stops its admission, its EndpointSlice takes it out of the routers' sight, and it ends
once its answers have.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from kvasir_operator.errors import OBJECT_ERRORS
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import POD, KubeObject, annotation_of
from kvasir_operator.observe.replicas import Replica, group_of
from kvasir_operator.rollout.observed import ObservedWorkload
from kvasir_operator.rollout.plan import RolloutPlan
from kvasir_operator.rollout.workload import WorkloadKey

logger = logging.getLogger(__name__)

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
ReadWork = Callable[[Iterable[KubeObject]], Awaitable[Mapping[str, int]]]
"""Requests that pods are answering, by pod name; pods that do not report it are left out."""
Work = Mapping[str, int]


@dataclass(frozen=True)
class Shrink:
    """`num_going` of a workload's `replicas` will be removed."""

    key: WorkloadKey
    replicas: tuple[Replica, ...]
    num_going: int


def find_shrinks(rollout: RolloutPlan, workloads: Iterable[ObservedWorkload]) -> list[Shrink]:
    """The workloads to which `rollout` gives fewer replicas, but some."""
    shrinks = []
    for each in workloads:
        left = rollout.replicas.get(each.workload.key, 0)
        if 0 < left < each.workload.replicas:
            replicas = _replicas(each)
            shrinks.append(Shrink(each.workload.key, replicas, max(each.workload.replicas, len(replicas)) - left))
    return shrinks


def _replicas(observed: ObservedWorkload) -> tuple[Replica, ...]:
    """Those that could stay: groups also without pods, pods only while they are not on their way out."""
    if groups := observed.groups:
        return tuple(group.replica for group in groups if group.is_running)
    return tuple(each for each in observed.replicas if not each.is_leaving)


async def read_shrinking(shrinks: Collection[Shrink], read_work: ReadWork) -> Work:
    """How busy the replicas are from which some go, by name of the pod that takes their requests."""
    replicas = [replica for shrink in shrinks for replica in shrink.replicas if replica.is_ready]
    leaders = [replica.leader for replica in replicas if replica.leader is not None]
    return await read_work(leaders) if leaders else {}


def going(shrink: Shrink, work: Work) -> list[Replica]:
    """The first goes first."""
    youngest_first = sorted(shrink.replicas, key=_made_at, reverse=True)
    return sorted(youngest_first, key=lambda replica: _busyness(replica, work))[: shrink.num_going]


def deletion_costs(shrink: Shrink, work: Work) -> dict[str, str | None]:
    """The costs to write, by pod name; None takes one away that an earlier shrink left.

    Those that are to go get a cost below 0, the others have none. Nothing is written where no pod reports its work:
    Kubernetes then takes the youngest; nor on pods of groups, which Kubernetes does not choose from.
    """
    pods = [pod for replica in shrink.replicas for pod in replica.pods if group_of(pod) is None]
    if not any(_name(pod) in work for pod in pods):
        return {}
    first = going(shrink, work)
    wanted = {replica.name: str(rank - len(first)) for rank, replica in enumerate(first)}
    before = {_name(pod): annotation_of(pod, DELETION_COST) for pod in pods}
    return {name: wanted.get(name) for name, cost in before.items() if cost != wanted.get(name)}


async def mark_least_work(client: KubeClient, shrinks: Collection[Shrink], work: Work) -> None:
    """Writes the costs. A pod that cannot be marked does not hold up the scale-down."""
    for shrink in shrinks:
        namespaces = {_name(pod): pod["metadata"]["namespace"] for replica in shrink.replicas for pod in replica.pods}
        for name, cost in deletion_costs(shrink, work).items():
            try:
                await client.merge(POD, namespaces[name], name, {"metadata": {"annotations": {DELETION_COST: cost}}})
            except OBJECT_ERRORS as error:
                logger.warning("pod %s/%s: not marked as one to go: %s", namespaces[name], name, error)


def _busyness(replica: Replica, work: Work) -> tuple[bool, float]:
    """Those that are not ready go first, as Kubernetes has it; one that does not report it counts as the busiest."""
    load = None if replica.leader is None else work.get(_name(replica.leader))
    return replica.is_ready, float("inf") if load is None else load


def _made_at(replica: Replica) -> str:
    """Of its oldest pod; what has no pod yet is the youngest."""
    return min((str(pod["metadata"]["creationTimestamp"]) for pod in replica.pods), default="9")


def _name(pod: KubeObject) -> str:
    return str(pod["metadata"]["name"])
