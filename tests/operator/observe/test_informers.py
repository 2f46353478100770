"""Which informers run: those of optional kinds come and go with their CRDs, and hold nothing up."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tests.operator.memory_kube import MemoryKube

from kvasir_operator.kube.client import LabelSelector
from kvasir_operator.kube.kinds import DEPLOYMENT, LEADER_WORKER_SET, POD, POD_MONITOR, SECRET, Kind, ServiceKey
from kvasir_operator.observe.cache import InformerCache
from kvasir_operator.observe.informer import Informers

WITHOUT = frozenset()
WITH = frozenset({POD_MONITOR, LEADER_WORKER_SET})
KEY = ServiceKey("models", "llama")


class WatchedKube(MemoryKube):
    """Knows which watches are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[tuple[Kind, str | None]] = set()

    async def watch(
        self, kind: Kind, namespace: str | None, labels: LabelSelector, resource_version: str, seconds: float
    ) -> AsyncIterator[dict[str, Any]]:
        self.open.add((kind, namespace))
        try:
            await asyncio.Event().wait()
            yield {}
        finally:
            self.open.remove((kind, namespace))

    async def until_open(self, kind: Kind, namespace: str | None = None, is_open: bool = True) -> None:
        while ((kind, namespace) in self.open) is not is_open:  # noqa: ASYNC110, a fake without events
            await asyncio.sleep(0.001)


class Running:
    """Informers over `kube`, whose features a test sets."""

    def __init__(self, namespaces: tuple[str, ...] | None = None) -> None:
        self.kube = WatchedKube()
        self.cache = InformerCache(is_namespaced=namespaces is not None)
        self.features = WITHOUT
        self.informers = Informers(
            self.kube, namespaces, self.cache, lambda key, wait: None, lambda key: None, lambda: self.features
        )
        self.task = asyncio.create_task(self.informers.run())

    def set_features(self, features: frozenset[Kind]) -> None:
        self.features = features
        self.informers.follow_kinds()


def test_an_optional_kind_without_its_crd_is_not_watched_and_holds_nothing_up() -> None:
    async def body() -> None:
        running = Running()
        assert not running.informers.are_synced
        await running.kube.until_open(POD)
        assert running.informers.are_synced
        watched = {kind for kind, _ in running.kube.open}
        assert DEPLOYMENT in watched
        assert not watched & {POD_MONITOR, LEADER_WORKER_SET, SECRET}
        running.task.cancel()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_crd_that_is_installed_later_is_watched_and_one_that_goes_is_forgotten() -> None:
    async def body() -> None:
        running = Running()
        await running.kube.until_open(POD)
        running.set_features(WITH)
        await running.kube.until_open(POD_MONITOR)
        assert running.cache.read(POD_MONITOR, KEY) == []
        running.set_features(WITHOUT)
        await running.kube.until_open(POD_MONITOR, is_open=False)
        assert running.cache.read(POD_MONITOR, KEY) is None
        assert running.cache.read(POD, KEY) == []
        running.task.cancel()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_each_of_several_namespaces_is_watched_and_known_by_itself() -> None:
    async def body() -> None:
        running = Running(("models", "more"))
        await running.kube.until_open(POD, "models")
        await running.kube.until_open(POD, "more")
        assert running.cache.read(POD, KEY) == []
        assert running.cache.read(POD, ServiceKey("elsewhere", "llama")) is None
        running.task.cancel()

    asyncio.run(asyncio.wait_for(body(), 10))
