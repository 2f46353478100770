"""What is answered from the cache, and what is put in there: on a client whose requests are counted."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.cached_kube import CachedKube
from kvasir_operator.child_cache import ChildCache
from kvasir_operator.kinds import INFERENCE_SERVICE, SERVICE, KubeObject
from kvasir_operator.kube import KubeClient

OWN = f"{SERVICE_LABEL}=llama"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Selectors of the lists that went to the API server."""
    selectors: list[str] = []

    async def list_from_server(self: KubeClient, kind: Any, namespace: Any, selector: str, fields: Any) -> list[Any]:
        selectors.append(selector)
        return []

    monkeypatch.setattr(KubeClient, "list", list_from_server)
    return selectors


def answer(version: str) -> Callable[[], Awaitable[KubeObject]]:
    async def send() -> KubeObject:
        metadata = {"name": "llama-engine", "namespace": "models", "labels": {SERVICE_LABEL: "llama"}}
        return {"metadata": {**metadata, "resourceVersion": version}}

    return send


def test_only_a_services_objects_of_a_kind_that_is_known_are_answered_from_the_cache(asked: list[str]) -> None:
    async def body() -> None:
        cache = ChildCache()
        kube = CachedKube(Configuration(), cache)
        await kube.list(SERVICE, "models", OWN)
        cache.finish_list(SERVICE, set(), 1)
        await kube.list(SERVICE, "models", OWN)
        await kube.list(SERVICE, None, OWN)
        await kube.list(SERVICE, "models", SERVICE_LABEL)
        await kube.close()

    asyncio.run(body())
    assert asked == [OWN, OWN, SERVICE_LABEL]


def test_a_written_child_is_known_at_once(asked: list[str]) -> None:
    async def body() -> list[KubeObject]:
        cache = ChildCache()
        cache.finish_list(SERVICE, set(), 1)
        kube = CachedKube(Configuration(), cache)
        await kube._write("apply", SERVICE, answer("5"))
        await kube._write("patch_status", INFERENCE_SERVICE, answer("6"))
        await kube.close()
        return await kube.list(SERVICE, "models", OWN)

    [child] = asyncio.run(body())
    assert child["metadata"]["resourceVersion"] == "5"
    assert asked == []
