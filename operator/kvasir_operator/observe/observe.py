"""What is there now: a service's children and pods, read by label, plus whatever holds a wanted child's name.

Where the client has a cache (kube/cached.py) only the last, the service's Secret among them, are asked of the API
server, and the Events of pods that cannot be understood without them (pod_events.py).
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.errors import KubeForbiddenError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import (
    EVENT,
    POD,
    Kind,
    KubeObject,
    ObjectKey,
    ServiceKey,
    object_key,
)
from kvasir_operator.observe.model_loader import DownloadProgress
from kvasir_operator.observe.pod_events import pods_to_ask
from kvasir_operator.observe.replicas import EngineContext

logger = logging.getLogger(__name__)

PodEvents = Mapping[str, list[KubeObject]]
"""Events by the name of the pod that they are about."""
Downloads = Mapping[str, DownloadProgress]
"""How far loaders are, by the name of their pod; of those that said it."""


@dataclass(frozen=True)
class Observed:
    """`children` may hold objects of other owners that have our label or a wanted child's name."""

    children: tuple[KubeObject, ...] = ()
    pods: tuple[KubeObject, ...] = ()
    pod_events: PodEvents = field(default_factory=dict)
    downloads: Downloads = field(default_factory=dict)
    cut_context: EngineContext | None = None
    """The shortest of its engines' contexts that are cut."""

    def with_children(self, written: Collection[KubeObject]) -> "Observed":
        """The same after `written` were applied."""
        by_key = {object_key(obj): obj for obj in (*self.children, *written)}
        return replace(self, children=tuple(by_key.values()))


async def observe(
    client: KubeClient,
    key: ServiceKey,
    wanted: Collection[ObjectKey],
    child_kinds: Iterable[Kind],
) -> Observed:
    """`child_kinds` are those that the cluster serves and children are listed of.

    Raises KubeApiError when anything cannot be read: half a picture would prune and report wrongly.
    """
    own = {SERVICE_LABEL: key.name}
    # One after the other: what the cache knows costs no task so, of which a pass would have one a kind.
    children = [child for kind in child_kinds for child in await client.list(kind, key.namespace, own)]
    pods = await client.list(POD, key.namespace, own)
    unseen = set(wanted) - {object_key(child) for child in children}
    # A Secret, a child whose label was taken off, or somebody else's object that has the name that we want.
    by_name = await named(client, key.namespace, unseen)
    events = await _pod_events(client, key.namespace, pods_to_ask(pods))
    return Observed((*children, *by_name), tuple(pods), events)


async def named(client: KubeClient, namespace: str, keys: Iterable[ObjectKey]) -> list[KubeObject]:
    """Those that are there."""
    found = await asyncio.gather(*(client.get(each.kind, namespace, each.name) for each in keys))
    return [obj for obj in found if obj is not None]


async def _pod_events(client: KubeClient, namespace: str, pods: Iterable[KubeObject]) -> PodEvents:
    metadata = [pod["metadata"] for pod in pods]
    try:
        lists = await asyncio.gather(
            *(client.list(EVENT, namespace, fields=f"involvedObject.uid={each['uid']}") for each in metadata)
        )
    except KubeForbiddenError as error:
        logger.warning("%s: the status cannot say why volumes are not mounted: %s", namespace, error)
        return {}
    return {each["name"]: events for each, events in zip(metadata, lists, strict=True)}
