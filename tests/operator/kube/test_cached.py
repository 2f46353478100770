"""What is answered from the cache, and what is put in there: on a client whose requests a server counts."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from tests.operator.cluster_objects import service

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.errors import KubeUnavailableError, ObjectConflictError, ObjectNotFoundError
from kvasir_operator.kube.cached import CachedClient
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, SERVICE, KubeObject, NamespacedName, ServiceKey
from kvasir_operator.observe.cache import InformerCache
from kvasir_operator.observe.observe import Observed, observe

from .http_api import Answer, HttpApi, answering, http_api, nothing, refusal

OWN = {SERVICE_LABEL: "llama"}
OWN_LISTED, ALL_LISTED = ("GET", f"{SERVICE_LABEL}=llama"), ("GET", SERVICE_LABEL)
LLAMA = ServiceKey("models", "llama")


class Cached:
    """A client, its cache, and the API server behind it. It knows the Services that there are: none."""

    def __init__(self, api: HttpApi) -> None:
        self.cache = InformerCache()
        self.api = api
        self.kube = CachedClient(api.configuration, self.cache)
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


def know_services(cached: Cached, *services: KubeObject) -> None:
    for each in services:
        cached.cache.put(INFERENCE_SERVICE, each)
    cached.cache.finish_list(
        INFERENCE_SERVICE, None, {NamespacedName("models", each["metadata"]["name"]) for each in services}, 9
    )


def test_services_are_asked_for_until_all_are_known_and_other_kinds_by_name_always() -> None:
    async def body(cached: Cached) -> None:
        assert await cached.kube.get(INFERENCE_SERVICE, "models", "llama") == service()
        cached.api.answer = nothing
        know_services(cached, service())
        await cached.kube.get(DEPLOYMENT, "models", "llama")
        assert await cached.kube.get(INFERENCE_SERVICE, "models", "llama") == service()
        assert await cached.kube.get(INFERENCE_SERVICE, "models", "mistral") is None
        assert cached.api.asked == [("GET", "inferenceservices"), ("GET", "llama")]

    run(body, answering({"metadata": {"resourceVersion": "9"}, "items": [service()]}))


def test_all_services_or_those_of_a_namespace_are_listed_without_a_request() -> None:
    async def body(cached: Cached) -> None:
        know_services(cached, service(), service("mistral"))
        for namespace, number in ((None, 2), ("models", 2), ("elsewhere", 0)):
            assert len(await cached.kube.list(INFERENCE_SERVICE, namespace)) == number
        assert cached.api.asked == []

    run(body)


@pytest.mark.parametrize(
    ("status", "refused", "is_known"),
    [(409, ObjectConflictError, True), (503, KubeUnavailableError, True), (404, ObjectNotFoundError, False)],
)
def test_a_service_whose_status_is_not_stored_since_it_is_gone_is_known_no_more(
    status: int, refused: type[Exception], is_known: bool
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return refusal(status)

    async def body(cached: Cached) -> None:
        know_services(cached, service())
        with pytest.raises(refused):
            await cached.kube.apply_status(service())
        assert (await cached.kube.get(INFERENCE_SERVICE, "models", "llama") is not None) is is_known

    run(body, answer)


def test_a_service_is_known_with_the_status_that_was_stored() -> None:
    stored = {**service(status={"phase": "Ready"}), "metadata": {**service()["metadata"], "resourceVersion": "10"}}

    async def body(cached: Cached) -> None:
        know_services(cached, service())
        await cached.kube.apply_status(service())
        assert await cached.kube.get(INFERENCE_SERVICE, "models", "llama") == stored

    run(body, answering(stored))
