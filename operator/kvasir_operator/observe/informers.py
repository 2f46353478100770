"""All informers of a running operator: one a kind and namespace, of optional kinds while their CRD is there."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.features import ClusterFeatures
from kvasir_operator.kube.kinds import OPTIONAL_KINDS, POD, Kind
from kvasir_operator.observe.cache import InformerCache
from kvasir_operator.observe.informer import Informer, Wake


@dataclass(frozen=True)
class _Running:
    informer: Informer
    task: asyncio.Task[None]


class Informers:
    """`namespaces` None is the whole cluster. `wake` is called for every service that there is news of."""

    def __init__(
        self,
        client: KubeClient,
        namespaces: Sequence[str] | None,
        cache: InformerCache,
        wake: Wake,
        features: Callable[[], ClusterFeatures],
    ) -> None:
        self._client = client
        self._namespaces: Sequence[str | None] = (None,) if namespaces is None else namespaces
        self._cache = cache
        self._wake = wake
        self._features = features
        self._list_turn = asyncio.Lock()
        self._running: dict[Kind, list[_Running]] = {}
        self._changed = asyncio.Event()

    @property
    def are_synced(self) -> bool:
        """Whether the first lists were read of every kind that each cluster serves; optional ones hold nothing up."""
        needed = [each for kind, running in self._running.items() if kind not in OPTIONAL_KINDS for each in running]
        return bool(needed) and all(each.informer.synced.is_set() for each in needed)

    def follow_features(self) -> None:
        """To be called when the features have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                self._start_and_stop(group)
                await self._changed.wait()

    def _start_and_stop(self, group: asyncio.TaskGroup) -> None:
        wanted = (*self._features().listed_child_kinds, POD)
        for kind in [kind for kind in self._running if kind not in wanted]:
            for each in self._running.pop(kind):
                each.task.cancel()
            self._cache.forget(kind)
        for kind in wanted:
            if kind not in self._running:
                self._running[kind] = [self._start(group, kind, namespace) for namespace in self._namespaces]

    def _start(self, group: asyncio.TaskGroup, kind: Kind, namespace: str | None) -> _Running:
        informer = Informer(self._client, kind, namespace, self._cache, self._wake, self._list_turn)
        return _Running(informer, group.create_task(informer.run(), name=f"informer of {kind.plural}"))
