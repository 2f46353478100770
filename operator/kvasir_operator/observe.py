"""What is there now: a service's children and pods, read by label, plus whatever holds a wanted child's name.

Read from the API server at every pass rather than from a cache: a pass then sees its own writes, and an unchanged
service is never written because a cache was behind.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.kinds import CHILD_KINDS, POD, KubeObject, ObjectKey, ServiceKey, object_key
from kvasir_operator.kube import KubeClient


@dataclass(frozen=True)
class Observed:
    """`children` may hold objects of other owners that have our label or a wanted child's name."""

    children: tuple[KubeObject, ...] = ()
    pods: tuple[KubeObject, ...] = ()

    def with_children(self, written: Collection[KubeObject]) -> "Observed":
        """The same after `written` were applied."""
        by_key = {object_key(obj): obj for obj in (*self.children, *written)}
        return Observed(tuple(by_key.values()), self.pods)


async def observe(client: KubeClient, key: ServiceKey, wanted: Collection[ObjectKey]) -> Observed:
    """Raises KubeApiError when anything cannot be read: half a picture would prune and report wrongly."""
    selector = f"{SERVICE_LABEL}={key.name}"
    lists = await asyncio.gather(*(client.list(kind, key.namespace, selector) for kind in (*CHILD_KINDS, POD)))
    children = [child for listed in lists[:-1] for child in listed]
    unseen = set(wanted) - {object_key(child) for child in children}
    # A child whose label was taken off, or somebody else's object that has the name that we want.
    by_name = await asyncio.gather(*(client.get(missing.kind, key.namespace, missing.name) for missing in unseen))
    return Observed((*children, *(found for found in by_name if found is not None)), tuple(lists[-1]))
