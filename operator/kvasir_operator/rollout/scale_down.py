"""Which of a workload's pods go when it shrinks: those with the least work, of equals the youngest (the coldest cache).

Kubernetes removes the pods with the lowest pod-deletion-cost first, so the choice is written there before the smaller
number is applied. A pod that goes then drains by itself: SIGTERM stops its admission, its EndpointSlice takes it out of
the routers' sight, and it ends once its answers have.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from kvasir_operator.errors import OBJECT_ERRORS
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import POD, KubeObject, is_terminating
from kvasir_operator.observe.waiting import is_ready
from kvasir_operator.rollout.observed import ObservedWorkload
from kvasir_operator.rollout.plan import RolloutPlan

logger = logging.getLogger(__name__)

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
ReadWork = Callable[[Iterable[KubeObject]], Awaitable[Mapping[str, int]]]
"""Requests that pods are answering, by pod name; pods that do not report it are left out."""


@dataclass(frozen=True)
class Shrink:
    """`num_going` of a workload's `pods` will be removed."""

    pods: tuple[KubeObject, ...]
    num_going: int


def find_shrinks(rollout: RolloutPlan, workloads: Iterable[ObservedWorkload]) -> list[Shrink]:
    """The workloads to which `rollout` gives fewer pods, but some."""
    shrinks = []
    for each in workloads:
        pods = tuple(pod for pod in each.pods if not is_terminating(pod))
        left = rollout.replicas.get(each.workload.key, 0)
        if 0 < left < each.workload.replicas:
            shrinks.append(Shrink(pods, max(each.workload.replicas, len(pods)) - left))
    return shrinks


def deletion_costs(shrink: Shrink, work: Mapping[str, int]) -> dict[str, str | None]:
    """The costs to write, by pod name; None takes one away that an earlier shrink left.

    Those that are to go get a cost below 0, the others have none. Nothing is written where no pod reports its work:
    Kubernetes then takes the youngest.
    """
    if not work:
        return {}
    youngest_first = sorted(shrink.pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    going = sorted(youngest_first, key=lambda pod: _busyness(pod, work))[: shrink.num_going]
    wanted = {_name(pod): str(rank - len(going)) for rank, pod in enumerate(going)}
    before = {_name(pod): pod["metadata"].get("annotations", {}).get(DELETION_COST) for pod in shrink.pods}
    return {name: wanted.get(name) for name, cost in before.items() if cost != wanted.get(name)}


async def mark_least_work(client: KubeClient, shrinks: Collection[Shrink], read_work: ReadWork) -> None:
    """Writes the costs. A pod that cannot be asked or marked does not hold up the scale-down."""
    for shrink in shrinks:
        costs = deletion_costs(shrink, await read_work(filter(is_ready, shrink.pods)))
        namespaces = {_name(pod): pod["metadata"]["namespace"] for pod in shrink.pods}
        for name, cost in costs.items():
            try:
                await client.merge(POD, namespaces[name], name, {"metadata": {"annotations": {DELETION_COST: cost}}})
            except OBJECT_ERRORS as error:
                logger.warning("pod %s/%s: not marked as one to go: %s", namespaces[name], name, error)


def _busyness(pod: KubeObject, work: Mapping[str, int]) -> tuple[bool, float]:
    """Pods that are not ready go first, as Kubernetes has it; one that does not report it counts as the busiest."""
    return is_ready(pod), work.get(_name(pod), float("inf"))


def _name(pod: KubeObject) -> str:
    return str(pod["metadata"]["name"])
