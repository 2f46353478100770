"""What is answered from the cache, and what is put in there: on a client whose requests are counted."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pytest
from kubernetes.aio.client import Configuration
from tests.operator.cluster_objects import service

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.errors import KubeUnavailableError, ObjectConflictError, ObjectNotFoundError
from kvasir_operator.kube.cached import CachedClient
from kvasir_operator.kube.client import KubeClient, LabelSelector
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, SERVICE, KubeObject, ServiceKey
from kvasir_operator.observe.cache import InformerCache
from kvasir_operator.observe.observe import Observed, observe
from kvasir_operator.observe.seen_services import SeenServices

OWN = {SERVICE_LABEL: "llama"}
ALL = {SERVICE_LABEL: None}
LLAMA = ServiceKey("models", "llama")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LabelSelector]:
    """Selectors of the lists that went to the API server."""
    selectors: list[LabelSelector] = []

    async def list_from_server(
        self: KubeClient, kind: Any, namespace: Any, labels: LabelSelector, fields: Any
    ) -> list[Any]:
        selectors.append(labels)
        return []

    monkeypatch.setattr(KubeClient, "list", list_from_server)
    return selectors


def answer(version: str) -> Callable[[], Awaitable[KubeObject]]:
    async def send() -> KubeObject:
        metadata = {"name": "llama-engine", "namespace": "models", "labels": {SERVICE_LABEL: "llama"}}
        return {"metadata": {**metadata, "resourceVersion": version}}

    return send


def test_only_a_services_objects_of_a_kind_that_is_known_are_answered_from_the_cache(
    asked: list[LabelSelector],
) -> None:
    async def body() -> None:
        cache = InformerCache()
        kube = CachedClient(Configuration(), cache, SeenServices(lambda: 0.0))
        await kube.list(SERVICE, "models", OWN)
        cache.finish_list(SERVICE, None, set(), 1)
        await kube.list(SERVICE, "models", OWN)
        await kube.list(SERVICE, None, OWN)
        await kube.list(SERVICE, "models", ALL)
        await kube.list(SERVICE, "models", {**OWN, "app": "x"})
        await kube.close()

    asyncio.run(body())
    assert asked == [OWN, OWN, ALL, {**OWN, "app": "x"}]


def test_a_services_objects_are_known_once_their_kind_was_listed() -> None:
    cache = InformerCache()
    kube = CachedClient(Configuration(), cache, SeenServices(lambda: 0.0))
    assert kube.known(SERVICE, LLAMA) is None
    cache.finish_list(SERVICE, None, set(), 1)
    assert kube.known(SERVICE, LLAMA) == []


def test_a_pass_lists_what_is_not_known_and_nothing_else(asked: list[LabelSelector]) -> None:
    cache = InformerCache()
    cache.finish_list(SERVICE, None, set(), 1)
    kube = CachedClient(Configuration(), cache, SeenServices(lambda: 0.0))
    assert asyncio.run(observe(kube, LLAMA, [], [SERVICE, DEPLOYMENT])) == Observed()
    assert asked == [OWN, OWN]  # Deployments and pods


def test_a_child_is_being_written_until_the_answer_is_there(asked: list[LabelSelector]) -> None:
    """Of two writes at once, both."""

    async def body() -> list[bool]:
        cache, answered, found = InformerCache(), asyncio.Event(), []
        kube = CachedClient(Configuration(), cache, SeenServices(lambda: 0.0))
        child = await answer("5")()

        async def send() -> KubeObject:
            await answered.wait()
            raise KubeUnavailableError("no answer")

        async def write(call: Callable[[], Awaitable[KubeObject]]) -> None:
            with pytest.raises(KubeUnavailableError):
                await kube._write("apply", SERVICE, "models", "llama-engine", call)

        async def fail() -> KubeObject:
            raise KubeUnavailableError("no answer")

        writing = asyncio.create_task(write(send))
        await asyncio.sleep(0)
        await write(fail)
        found.append(cache.is_writing(SERVICE, child))
        answered.set()
        await writing
        found.append(cache.is_writing(SERVICE, child))
        await kube.close()
        return found

    assert asyncio.run(body()) == [True, False]


def test_a_written_child_is_known_at_once(asked: list[LabelSelector]) -> None:
    async def body() -> list[KubeObject]:
        cache = InformerCache()
        cache.finish_list(SERVICE, None, set(), 1)
        kube = CachedClient(Configuration(), cache, SeenServices(lambda: 0.0))
        await kube._write("apply", SERVICE, "models", "llama-engine", answer("5"))
        await kube._write("apply_status", INFERENCE_SERVICE, "models", "llama-engine", answer("6"))
        await kube.close()
        return await kube.list(SERVICE, "models", OWN)

    [child] = asyncio.run(body())
    assert child["metadata"]["resourceVersion"] == "5"
    assert asked == []


@pytest.mark.parametrize(
    ("refusal", "num_left"),
    [(None, 0), (ObjectNotFoundError("gone", 404), 0), (ObjectConflictError("another has the name", 409), 1)],
)
def test_a_deleted_child_is_forgotten_at_once_and_a_namesake_is_not(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception | None, num_left: int
) -> None:
    async def write(*_: Any) -> KubeObject:
        if refusal is not None:
            raise refusal
        return {}

    async def body() -> list[KubeObject]:
        cache = InformerCache()
        cache.finish_list(SERVICE, None, set(), 1)
        kube = CachedClient(Configuration(), cache, SeenServices(lambda: 0.0))
        await kube._write("apply", SERVICE, "models", "llama-engine", answer("5"))
        monkeypatch.setattr(KubeClient, "_write", write)
        await kube.delete(SERVICE, "models", "llama-engine", "uid-of-the-first")
        await kube.close()
        return await kube.list(SERVICE, "models", OWN)

    assert len(asyncio.run(body())) == num_left


def test_a_service_that_was_shown_is_not_asked_for_and_other_kinds_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def get(self: KubeClient, kind: Any, namespace: str, name: str) -> None:
        asked.append((kind, name))

    async def body() -> KubeObject | None:
        seen = SeenServices(lambda: 0.0)
        seen.watch("ADDED", service())
        kube = CachedClient(Configuration(), InformerCache(), seen)
        await kube.get(DEPLOYMENT, "models", "llama")
        await kube.get(INFERENCE_SERVICE, "models", "mistral")
        await kube.close()
        return await kube.get(INFERENCE_SERVICE, "models", "llama")

    monkeypatch.setattr(KubeClient, "get", get)
    assert asyncio.run(body()) == service()
    assert asked == [(DEPLOYMENT, "llama"), (INFERENCE_SERVICE, "mistral")]


@pytest.mark.parametrize("refusal", [None, ObjectConflictError("changed", 409), KubeUnavailableError("no answer")])
def test_a_service_whose_status_was_stored_is_known_with_it_and_one_whose_was_not_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception | None
) -> None:
    stored = {**service(status={"phase": "Ready"}), "metadata": {**service()["metadata"], "resourceVersion": "10"}}

    async def apply_status(self: KubeClient, obj: KubeObject) -> KubeObject:
        if refusal is not None:
            raise refusal
        return stored

    async def body() -> KubeObject | None:
        seen = SeenServices(lambda: 0.0)
        seen.watch("ADDED", service())
        kube = CachedClient(Configuration(), InformerCache(), seen)
        with nullcontext() if refusal is None else pytest.raises(type(refusal)):
            await kube.apply_status(service())
        await kube.close()
        return seen.of(ServiceKey("models", "llama"))

    monkeypatch.setattr(KubeClient, "apply_status", apply_status)
    assert asyncio.run(body()) == (stored if refusal is None else None)
