"""What is answered from the cache, and what is put in there: on a client whose requests a server counts."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from tests.operator.cluster_objects import service

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.errors import KubeUnavailableError, ObjectConflictError
from kvasir_operator.kube.cached import CachedClient
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, SERVICE, KubeObject, ServiceKey
from kvasir_operator.observe.cache import InformerCache
from kvasir_operator.observe.observe import Observed, observe
from kvasir_operator.observe.seen_services import SeenServices

from .http_api import Answer, HttpApi, answering, http_api, nothing, refusal

OWN = {SERVICE_LABEL: "llama"}
OWN_LISTED, ALL_LISTED = ("GET", f"{SERVICE_LABEL}=llama"), ("GET", SERVICE_LABEL)
LLAMA = ServiceKey("models", "llama")


class Cached:
    """A client, its caches, and the API server behind it. It knows the Services that there are: none."""

    def __init__(self, api: HttpApi) -> None:
        self.cache, self.seen = InformerCache(), SeenServices(lambda: 0.0)
        self.api = api
        self.kube = CachedClient(api.configuration, self.cache, self.seen)
        self.cache.finish_list(SERVICE, None, set(), 1)


def run(body: Callable[[Cached], Awaitable[None]], answer: Answer = nothing) -> None:
    async def run_body() -> None:
        async with http_api(answer) as api, asyncio.timeout(30):
            cached = Cached(api)
            try:
                await body(cached)
            finally:
                await cached.kube.close()

    asyncio.run(run_body())


def child(version: str = "5") -> KubeObject:
    metadata = {"name": "llama-engine", "namespace": "models", "labels": OWN, "resourceVersion": version}
    return {"apiVersion": SERVICE.api_version, "kind": SERVICE.kind, "metadata": metadata}


def test_only_a_services_objects_of_a_kind_that_is_known_are_answered_from_the_cache() -> None:
    async def body(cached: Cached) -> None:
        await cached.kube.list(DEPLOYMENT, "models", OWN)
        await cached.kube.list(SERVICE, "models", OWN)
        await cached.kube.list(SERVICE, None, OWN)
        await cached.kube.list(SERVICE, "models", {SERVICE_LABEL: None})
        await cached.kube.list(SERVICE, "models", {**OWN, "app": "x"})
        assert cached.api.asked == [OWN_LISTED, OWN_LISTED, ALL_LISTED, ("GET", f"{SERVICE_LABEL}=llama,app=x")]

    run(body)


def test_a_services_objects_are_known_once_their_kind_was_listed() -> None:
    cache = InformerCache()
    kube = CachedClient(Configuration(), cache, SeenServices(lambda: 0.0))
    assert kube.known(SERVICE, LLAMA) is None
    cache.finish_list(SERVICE, None, set(), 1)
    assert kube.known(SERVICE, LLAMA) == []


def test_a_pass_lists_what_is_not_known_and_nothing_else() -> None:
    async def body(cached: Cached) -> None:
        assert await observe(cached.kube, LLAMA, [], [SERVICE, DEPLOYMENT]) == Observed()
        assert cached.api.asked == [OWN_LISTED, OWN_LISTED]  # Deployments and pods

    run(body)


def test_a_child_is_being_written_until_the_answer_is_there() -> None:
    """Of two writes at once, both."""
    asked, answered = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if not asked.is_set():
            asked.set()
            await answered.wait()
        return refusal(503)

    async def body(cached: Cached) -> None:
        async def write() -> None:
            with pytest.raises(KubeUnavailableError):
                await cached.kube.apply(child())

        writing = asyncio.create_task(write())
        await asked.wait()
        await write()
        assert cached.cache.is_writing(SERVICE, child())
        answered.set()
        await writing
        assert not cached.cache.is_writing(SERVICE, child())

    run(body, answer)


def test_a_written_child_is_known_at_once() -> None:
    async def body(cached: Cached) -> None:
        await cached.kube.apply(child())
        cached.api.answer = answering(service())
        await cached.kube.apply_status(service())
        [known] = await cached.kube.list(SERVICE, "models", OWN)
        assert known["metadata"]["resourceVersion"] == "5"
        assert [method for method, _ in cached.api.asked] == ["PATCH", "PATCH"]

    run(body, answering(child()))


@pytest.mark.parametrize(("status", "num_left"), [(200, 0), (404, 0), (409, 1)], ids=["deleted", "gone", "a namesake"])
def test_a_deleted_child_is_forgotten_at_once_and_a_namesake_is_not(status: int, num_left: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return refusal(status) if request.method == "DELETE" else web.json_response(child())

    async def body(cached: Cached) -> None:
        await cached.kube.apply(child())
        await cached.kube.delete(SERVICE, "models", "llama-engine", "uid-of-the-first")
        assert len(await cached.kube.list(SERVICE, "models", OWN)) == num_left

    run(body, answer)


def test_a_service_that_was_shown_is_not_asked_for_and_other_kinds_are() -> None:
    async def body(cached: Cached) -> None:
        cached.seen.watch("ADDED", service())
        await cached.kube.get(DEPLOYMENT, "models", "llama")
        await cached.kube.get(INFERENCE_SERVICE, "models", "mistral")
        assert await cached.kube.get(INFERENCE_SERVICE, "models", "llama") == service()
        assert cached.api.asked == [("GET", "llama"), ("GET", "mistral")]

    run(body)


@pytest.mark.parametrize(("status", "refused"), [(200, None), (409, ObjectConflictError), (503, KubeUnavailableError)])
def test_a_service_whose_status_was_stored_is_known_with_it_and_one_whose_was_not_is_asked_for(
    status: int, refused: type[Exception] | None
) -> None:
    stored = {**service(status={"phase": "Ready"}), "metadata": {**service()["metadata"], "resourceVersion": "10"}}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(stored) if refused is None else refusal(status)

    async def body(cached: Cached) -> None:
        cached.seen.watch("ADDED", service())
        with nullcontext() if refused is None else pytest.raises(refused):
            await cached.kube.apply_status(service())
        assert cached.seen.of(LLAMA) == (stored if refused is None else None)

    run(body, answer)
