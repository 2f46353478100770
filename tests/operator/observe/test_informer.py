"""A watch of children: which services it wakes, and how it goes on after it broke or expired."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.operator.cluster_objects import NOW, deployment, pod, service
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import KubeUnavailableError, WatchExpiredError
from kvasir_operator.kube.client import LabelSelector
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, POD, Kind, NamespacedName, ServiceKey
from kvasir_operator.observe.cache import InformerCache
from kvasir_operator.observe.informer import COUNTS_WAIT_SECONDS, Informer

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
        self, kind: Kind, namespace: str | None, labels: LabelSelector, resource_version: str, seconds: float
    ) -> AsyncIterator[dict[str, Any]]:
        assert labels == ({} if kind == INFERENCE_SERVICE else {"serving.kvasir.dev/service": None})
        self.versions.append(resource_version)
        if not self.script:
            self.silent.set()
            await asyncio.Event().wait()
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        for event in step:
            yield event


def versioned(name: str, version: str) -> dict[str, Any]:
    obj = pod(name)
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": version}}


def event(kind: str, name: str, version: str) -> dict[str, Any]:
    return {"type": kind, "object": versioned(name, version)}


def waits(
    kind: Kind, *objects: dict[str, Any], deleted: dict[str, Any] | None = None, cache: InformerCache | None = None
) -> list[float]:
    """Of the service that a watch which shows these states, and a deletion then, wakes, in seconds."""
    events = [{"type": "MODIFIED", "object": obj} for obj in objects]
    events += [] if deleted is None else [{"type": "DELETED", "object": deleted}]

    async def body() -> list[float]:
        found: list[float] = []
        kube = ScriptedKube([events])

        def wake(key: ServiceKey, wait_seconds: float) -> None:
            assert key == LLAMA
            found.append(wait_seconds)

        running = asyncio.create_task(Informer(kube, kind, None, cache or InformerCache(), wake, asyncio.Lock()).run())
        await asyncio.wait_for(kube.silent.wait(), 10)
        running.cancel()
        return found

    return asyncio.run(body())


def watched(script: Script, num_pods: int = 0) -> tuple[list[ServiceKey], list[str], list[str]]:
    """Woken keys, the versions from which watches were opened, and the names of the pods that are then known."""

    async def body() -> tuple[list[ServiceKey], list[str], list[str]]:
        woken: list[ServiceKey] = []
        kube, cache = ScriptedKube(script), InformerCache()
        for number in range(num_pods):
            kube.objects[("Pod", "models", str(number))] = versioned(str(number), "0")
        informer = Informer(kube, POD, None, cache, lambda key, wait: woken.append(key), asyncio.Lock())
        running = asyncio.create_task(informer.run())
        await asyncio.wait_for(kube.silent.wait(), 10)
        running.cancel()
        return woken, kube.versions, [each["metadata"]["name"] for each in cache.read(POD, LLAMA) or []]

    return asyncio.run(body())


def test_the_first_list_wakes_the_service_of_every_pod_on_every_page() -> None:
    assert watched([], num_pods=3) == ([LLAMA] * 3, ["0"], ["0", "1", "2"])


def test_each_change_wakes_its_service_and_bookmarks_only_move_on() -> None:
    woken, versions, known = watched([[event("ADDED", "p", "5"), BOOKMARK]])
    assert (woken, versions, known) == ([LLAMA], ["0", "99"], ["p"])


def test_a_pod_that_goes_wakes_its_service() -> None:
    woken, _, known = watched([[event("ADDED", "p", "5"), event("DELETED", "p", "6")]])
    assert (woken, known) == ([LLAMA, LLAMA], [])


def test_an_expired_watch_lists_again_and_wakes_services_whose_pods_went_away_meanwhile() -> None:
    woken, versions, known = watched([[event("ADDED", "p", "5")], WatchExpiredError("too old", 410)])
    assert (woken, versions, known) == ([LLAMA, LLAMA], ["0", "5", "0"], [])


def test_a_broken_watch_lists_again_after_a_while() -> None:
    _, versions, _ = watched([KubeUnavailableError("gone")])
    assert versions == ["0", "0"]


def test_watches_that_end_at_once_are_not_begun_without_a_pause() -> None:
    async def body() -> list[str]:
        kube = ScriptedKube([[] for _ in range(50)])
        informer = Informer(kube, POD, None, InformerCache(), lambda key, wait: None, asyncio.Lock())
        running = asyncio.create_task(informer.run())
        for _ in range(500):
            await asyncio.sleep(0)
        running.cancel()
        return kube.versions

    assert asyncio.run(body()) == ["0"]


def counted(version: int, generation: int, observed: int, total: int = 0) -> dict[str, Any]:
    found = deployment(total=total)
    found["metadata"] |= {"resourceVersion": str(version), "generation": generation}
    found["status"]["observedGeneration"] = observed
    return found


def test_what_a_workloads_controller_has_counted_may_wait_for_more_and_what_others_changed_may_not() -> None:
    edited, seen = counted(5, generation=2, observed=1), counted(6, generation=2, observed=2)
    assert waits(DEPLOYMENT, edited, seen, counted(7, 2, 2, total=1)) == [0.0, COUNTS_WAIT_SECONDS, COUNTS_WAIT_SECONDS]


def test_news_of_a_pod_does_not_wait_but_of_one_that_no_node_has() -> None:
    unbound, running = {"spec": {}}, {"status": {"phase": "Running"}}
    leaving, unbound_leaving = versioned("p", "8"), versioned("q", "9") | unbound
    for each in (leaving, unbound_leaving):
        each["metadata"]["deletionTimestamp"] = NOW
    states = [versioned("p", "5") | unbound, versioned("p", "6"), versioned("p", "7") | running, leaving]
    assert waits(POD, *states, unbound_leaving) == [COUNTS_WAIT_SECONDS, 0.0, 0.0, 0.0, COUNTS_WAIT_SECONDS]


def test_what_our_own_write_has_done_is_no_news_before_its_answer_comes() -> None:
    cache = InformerCache()
    made, gone = counted(5, generation=1, observed=0), counted(6, generation=1, observed=0)
    with cache.writing(DEPLOYMENT, NamespacedName("models", "llama-serve")):
        assert waits(DEPLOYMENT, made, deleted=gone, cache=cache) == [COUNTS_WAIT_SECONDS, COUNTS_WAIT_SECONDS]


def test_a_workload_that_somebody_deleted_is_news_at_once() -> None:
    seen = counted(5, generation=1, observed=1)
    assert waits(DEPLOYMENT, seen, deleted=counted(6, 1, 1)) == [COUNTS_WAIT_SECONDS, 0.0]


@pytest.mark.parametrize(("spec", "seconds"), [({}, COUNTS_WAIT_SECONDS), ({"nodeName": "n"}, 0.0)])
def test_a_pod_that_is_gone_is_news_at_once_if_a_node_had_it(spec: dict[str, str], seconds: float) -> None:
    there, gone = (versioned("p", version) | {"spec": spec} for version in ("5", "6"))
    assert waits(POD, there, deleted=gone)[-1] == seconds


def test_a_service_is_woken_when_it_is_made_or_goes_and_not_by_its_status() -> None:
    shown = service(status={"phase": "Ready"})
    gone = {**shown, "metadata": {**shown["metadata"], "resourceVersion": "10"}}
    assert waits(INFERENCE_SERVICE, service(), shown, deleted=gone) == [0.0, 0.0]


def test_a_service_that_went_while_its_watch_was_broken_is_woken_and_known_no_more() -> None:
    async def body() -> tuple[list[ServiceKey], list[Any] | None]:
        woken: list[ServiceKey] = []
        cache = InformerCache()
        shown = {**service(), "metadata": {**service()["metadata"], "resourceVersion": "5"}}
        kube = ScriptedKube([[{"type": "ADDED", "object": shown}], KubeUnavailableError("gone")])
        informer = Informer(kube, INFERENCE_SERVICE, None, cache, lambda key, wait: woken.append(key), asyncio.Lock())
        running = asyncio.create_task(informer.run())
        await asyncio.wait_for(kube.silent.wait(), 10)
        running.cancel()
        return woken, cache.read(INFERENCE_SERVICE, LLAMA)

    assert asyncio.run(body()) == ([LLAMA, LLAMA], [])
