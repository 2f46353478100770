"""The pod watch: which services it wakes, and how it goes on after a broken or expired watch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvasir_operator.errors import KubeUnavailableError, WatchExpiredError
from kvasir_operator.kinds import Kind, ServiceKey
from kvasir_operator.pod_watch import PodWatch, service_key

from .cluster_objects import pod
from .memory_kube import MemoryKube

LLAMA = ServiceKey("models", "llama")
BOOKMARK = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "99"}}}
Script = list[list[dict[str, Any]] | Exception]


class ScriptedKube(MemoryKube):
    """Each watch gives the script's next entry; when there is none, it stays silent."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.versions: list[str] = []
        self.silent = asyncio.Event()

    async def watch(
        self, kind: Kind, namespace: str | None, selector: str, resource_version: str, seconds: float
    ) -> AsyncIterator[dict[str, Any]]:
        assert selector == "serving.kvasir.dev/service"
        self.versions.append(resource_version)
        if not self.script:
            self.silent.set()
            await asyncio.Event().wait()
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        for event in step:
            yield event


def event(kind: str, name: str, version: str) -> dict[str, Any]:
    obj = pod(name)
    return {"type": kind, "object": {**obj, "metadata": {**obj["metadata"], "resourceVersion": version}}}


def watched(script: Script, num_pods: int = 0) -> tuple[list[ServiceKey], list[str]]:
    """Woken keys, and the versions from which watches were opened."""

    async def body() -> tuple[list[ServiceKey], list[str]]:
        woken: list[ServiceKey] = []
        kube = ScriptedKube(script)
        for number in range(num_pods):
            kube.objects[("Pod", "models", str(number))] = pod(str(number))
        running = asyncio.create_task(PodWatch(kube, None, woken.append).run())
        await asyncio.wait_for(kube.silent.wait(), 10)
        running.cancel()
        return woken, kube.versions

    return asyncio.run(body())


def test_the_first_list_wakes_each_service_once_however_many_pages_and_pods() -> None:
    assert watched([], num_pods=3) == ([LLAMA], ["0"])


def test_each_change_wakes_its_service_and_bookmarks_only_move_on() -> None:
    woken, versions = watched([[event("ADDED", "p", "5"), BOOKMARK]])
    assert (woken, versions) == ([LLAMA], ["0", "99"])


def test_an_expired_watch_lists_again_and_wakes_services_whose_pods_went_away_meanwhile() -> None:
    woken, versions = watched([[event("ADDED", "p", "5")], WatchExpiredError("too old", 410)])
    assert (woken, versions) == ([LLAMA, LLAMA], ["0", "5", "0"])


def test_a_broken_watch_lists_again_after_a_while() -> None:
    _, versions = watched([KubeUnavailableError("gone")])
    assert versions == ["0", "0"]


def test_a_pod_without_our_label_belongs_to_no_service() -> None:
    assert service_key({"metadata": {"name": "x", "namespace": "models"}}) is None
