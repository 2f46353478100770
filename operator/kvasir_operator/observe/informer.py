"""Keeps a kind's part of the cache up to date, and wakes services when there is news: a paged list, then a watch.

Not through kopf, which never says what went away while no watch was open (docs/decisions/0012). Children and pods are
asked for by label: a cluster's other objects are never decoded here.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.errors import KubeApiError, WatchExpiredError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import (
    INFERENCE_SERVICE,
    OPTIONAL_KINDS,
    POD,
    WORKLOAD_KINDS,
    Kind,
    KubeObject,
    NamespacedName,
    ServiceKey,
    listed_child_kinds,
)
from kvasir_operator.observe.cache import InformerCache

logger = logging.getLogger(__name__)

WATCH_SECONDS = 300.0
COUNTS_WAIT_SECONDS = 2.0
"""For what only counts: a pod that no node has, a workload whose controller has counted its pods, and own writes."""
ANY_SERVICE: dict[str, str | None] = {SERVICE_LABEL: None}
_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 30.0

Wake: TypeAlias = Callable[[ServiceKey, float], None]
"""With a service that there is news of, and the seconds that a pass over it may wait for more."""


class Informer:
    """Of one kind, in one namespace or in all.

    `wake` is called for every service that there is news of: at the start, all that have a child.
    """

    def __init__(
        self,
        client: KubeClient,
        kind: Kind,
        namespace: str | None,
        cache: InformerCache,
        wake: Wake,
        list_turn: asyncio.Lock,
    ) -> None:
        """Informers that share `list_turn` list one after the other, so that few pages are in memory at once."""
        self._client = client
        self._kind = kind
        self._labels = {} if kind == INFERENCE_SERVICE else ANY_SERVICE
        self._namespace = namespace
        self._cache = cache
        self._wake = wake
        self._list_turn = list_turn
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled; an API server that does not answer is tried again with growing waits."""
        version, retry_seconds = None, _FIRST_RETRY_SECONDS
        while True:
            try:
                before = version
                version = await self._list() if version is None else await self._watch(version)
                retry_seconds = _FIRST_RETRY_SECONDS
                if version == before:  # whatever ends watches at once would be asked without a pause
                    await asyncio.sleep(retry_seconds)
            except WatchExpiredError:
                version = None
            except KubeApiError as error:
                logger.warning("watch of %s: %s; again in %g s", self._kind.plural, error, retry_seconds)
                version = None
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, _LONGEST_RETRY_SECONDS)

    async def _list(self) -> str:
        listed: set[NamespacedName] = set()
        version = ""
        async with self._list_turn:
            async for page in self._client.list_pages(self._kind, self._namespace, self._labels):
                version = page["metadata"]["resourceVersion"]
                self._report(self._cache.begin_list(self._kind, self._namespace, int(version)))
                for item in page.get("items") or []:
                    listed.add(NamespacedName(item["metadata"]["namespace"], item["metadata"]["name"]))
                    self._report(self._cache.put(self._kind, item))
        self._report(self._cache.finish_list(self._kind, self._namespace, listed, int(version)))
        self.synced.set()
        return version

    async def _watch(self, version: str) -> str:
        """Returns the version to go on from when the server ends the watch."""
        async for event in self._client.watch(self._kind, self._namespace, self._labels, version, WATCH_SECONDS):
            obj = event["object"]
            version = obj["metadata"]["resourceVersion"]
            if event["type"] == "DELETED":
                self._report(self._cache.remove(self._kind, obj), self._wait_seconds(obj, is_gone=True))
            elif event["type"] != "BOOKMARK":
                self._report(self._cache.put(self._kind, obj), self._wait_seconds(obj))
            self._cache.advance(self._kind, self._namespace, int(version))
        return version

    def _report(self, keys: set[ServiceKey], wait_seconds: float = 0.0) -> None:
        for key in keys:
            self._wake(key, wait_seconds)

    def _wait_seconds(self, obj: KubeObject, *, is_gone: bool = False) -> float:
        """What our own write has done, which may be seen before its answer, and what only counts may wait for more.

        What somebody else changed of a workload its controller has not observed yet.
        """
        status, metadata = obj.get("status", {}), obj["metadata"]
        if self._kind == POD:
            is_count = "nodeName" not in obj.get("spec", {})
        else:
            is_observed = status.get("observedGeneration") == metadata.get("generation")
            is_count = self._kind in WORKLOAD_KINDS and is_observed and not is_gone
        return COUNTS_WAIT_SECONDS if is_count or self._cache.is_writing(self._kind, obj) else 0.0


@dataclass(frozen=True)
class _Running:
    informer: Informer
    task: asyncio.Task[None]


class Informers:
    """All of a running operator: one a kind and namespace, of optional kinds while their CRD is there.

    `namespaces` None is the whole cluster. `wake` is called for every service that there is news of among its children
    and pods; `wake_changed` for every one that is there at the start, is made, changes its spec, or goes.
    """

    def __init__(
        self,
        client: KubeClient,
        namespaces: Sequence[str] | None,
        cache: InformerCache,
        wake: Wake,
        wake_changed: Callable[[ServiceKey], None],
        kinds: Callable[[], Collection[Kind]],
    ) -> None:
        self._client = client
        self._namespaces: Sequence[str | None] = (None,) if namespaces is None else namespaces
        self._cache = cache
        self._wake = wake
        self._wake_changed = wake_changed
        self._kinds = kinds
        self._list_turn = asyncio.Lock()
        self._running: dict[Kind, list[_Running]] = {}
        self._changed = asyncio.Event()

    @property
    def are_synced(self) -> bool:
        """Whether the first lists were read of every kind that each cluster serves; optional ones hold nothing up."""
        needed = [each for kind, running in self._running.items() if kind not in OPTIONAL_KINDS for each in running]
        return bool(needed) and all(each.informer.synced.is_set() for each in needed)

    def follow_kinds(self) -> None:
        """To be called when `kinds` have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                self._start_and_stop(group)
                await self._changed.wait()

    def _start_and_stop(self, group: asyncio.TaskGroup) -> None:
        wanted = (INFERENCE_SERVICE, *listed_child_kinds(self._kinds()), POD)  # services are listed first
        for kind in [kind for kind in self._running if kind not in wanted]:
            for each in self._running.pop(kind):
                each.task.cancel()
            self._cache.forget(kind)
        for kind in wanted:
            if kind not in self._running:
                self._running[kind] = [self._start(group, kind, namespace) for namespace in self._namespaces]

    def _start(self, group: asyncio.TaskGroup, kind: Kind, namespace: str | None) -> _Running:
        wake = self._wake if kind != INFERENCE_SERVICE else lambda key, _: self._wake_changed(key)
        informer = Informer(self._client, kind, namespace, self._cache, wake, self._list_turn)
        return _Running(informer, group.create_task(informer.run(), name=f"informer of {kind.plural}"))
