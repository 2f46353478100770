"""What is answered from the cache, and what is put in there: on a client whose requests are counted."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.errors import ObjectConflictError, ObjectNotFoundError
from kvasir_operator.kube.cached import CachedClient
from kvasir_operator.kube.client import KubeClient, LabelSelector
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, SERVICE, KubeObject
from kvasir_operator.observe.cache import InformerCache

OWN = {SERVICE_LABEL: "llama"}
ALL = {SERVICE_LABEL: None}


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
        kube = CachedClient(Configuration(), cache)
        await kube.list(SERVICE, "models", OWN)
        cache.finish_list(SERVICE, None, set(), 1)
        await kube.list(SERVICE, "models", OWN)
        await kube.list(SERVICE, None, OWN)
        await kube.list(SERVICE, "models", ALL)
        await kube.list(SERVICE, "models", {**OWN, "app": "x"})
        await kube.close()

    asyncio.run(body())
    assert asked == [OWN, OWN, ALL, {**OWN, "app": "x"}]


def test_a_written_child_is_known_at_once(asked: list[LabelSelector]) -> None:
    async def body() -> list[KubeObject]:
        cache = InformerCache()
        cache.finish_list(SERVICE, None, set(), 1)
        kube = CachedClient(Configuration(), cache)
        await kube._write("apply", SERVICE, answer("5"))
        await kube._write("apply_status", INFERENCE_SERVICE, answer("6"))
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
        kube = CachedClient(Configuration(), cache)
        await kube._write("apply", SERVICE, answer("5"))
        monkeypatch.setattr(KubeClient, "_write", write)
        await kube.delete(SERVICE, "models", "llama-engine", "uid-of-the-first")
        await kube.close()
        return await kube.list(SERVICE, "models", OWN)

    assert len(asyncio.run(body())) == num_left
