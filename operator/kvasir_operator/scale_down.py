"""Which engine pods go when a service shrinks: those with the least work, of equals the youngest (the coldest cache).

Kubernetes removes the pods with the lowest pod-deletion-cost first, so the choice is written there before the smaller
number is applied. A pod that goes then drains by itself: SIGTERM stops its admission, its EndpointSlice takes it out of
the routers' sight, and it ends once its answers have.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from kvasir_operator.api.labels import ROLE_LABEL, ROLE_ROUTER
from kvasir_operator.errors import KubeForbiddenError, ObjectConflictError, ObjectNotFoundError, ObjectRefusedError
from kvasir_operator.kinds import DEPLOYMENT, POD, KubeObject, is_terminating, object_key
from kvasir_operator.kube import KubeClient
from kvasir_operator.observe import Observed
from kvasir_operator.plan import Plan, controller_uid
from kvasir_operator.waiting import is_ready

logger = logging.getLogger(__name__)

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
ReadWork = Callable[[Iterable[KubeObject]], Awaitable[Mapping[str, int]]]
"""Requests that pods are answering, by pod name; pods that do not tell are left out."""


@dataclass(frozen=True)
class Shrink:
    """`num_going` of a role's `pods` will be removed."""

    pods: tuple[KubeObject, ...]
    num_going: int


def find_shrinks(plan: Plan, observed: Observed) -> list[Shrink]:
    """The engine Deployments to which `plan` gives fewer replicas, but some."""
    live = {object_key(child): child for child in observed.children}
    shrinks = []
    for action in plan.applies:
        role = action.obj["metadata"]["labels"].get(ROLE_LABEL)
        if action.key.kind != DEPLOYMENT or role == ROLE_ROUTER or action.key not in live:
            continue
        before, after = live[action.key]["spec"].get("replicas", 1), action.obj["spec"].get("replicas")
        if after is not None and 0 < after < before:
            shrinks.append(Shrink(_staying(observed.pods, role), before - after))
    return shrinks


def deletion_costs(shrink: Shrink, work: Mapping[str, int]) -> dict[str, str | None]:
    """The costs to write, by pod name; None takes one away that an earlier shrink left.

    Those that are to go get a cost below 0, the others have none. They are chosen in each ReplicaSet, as a rollout has
    several. Nothing is written where no pod tells of its work: Kubernetes then takes the youngest.
    """
    if not work:
        return {}
    wanted: dict[str, str] = {}
    for pods in _by_replica_set(shrink.pods):
        going = sorted(pods, key=lambda pod: _busyness(pod, work))[: shrink.num_going]
        wanted |= {_name(pod): str(rank - len(going)) for rank, pod in enumerate(going)}
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
            except (KubeForbiddenError, ObjectConflictError, ObjectNotFoundError, ObjectRefusedError) as error:
                logger.warning("pod %s/%s: not marked as one to go: %s", namespaces[name], name, error)


def _staying(pods: Iterable[KubeObject], role: str | None) -> tuple[KubeObject, ...]:
    return tuple(
        pod for pod in pods if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == role and not is_terminating(pod)
    )


def _by_replica_set(pods: Iterable[KubeObject]) -> Collection[list[KubeObject]]:
    """Youngest first in each."""
    groups: dict[str | None, list[KubeObject]] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True):
        groups.setdefault(controller_uid(pod), []).append(pod)
    return groups.values()


def _busyness(pod: KubeObject, work: Mapping[str, int]) -> tuple[bool, float]:
    """Pods that are not ready go first, as Kubernetes has it; one that does not tell counts as the busiest."""
    return is_ready(pod), work.get(_name(pod), float("inf"))


def _name(pod: KubeObject) -> str:
    return str(pod["metadata"]["name"])
