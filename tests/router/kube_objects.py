"""A Kubernetes API for tests, and the objects that a gateway reads there."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kvasir_router.endpoints.objects import KubernetesObject, ObjectKey, key_of
from kvasir_router.endpoints.slices import ROLE_LABEL, SERVICE_LABEL


class ObjectStore:
    """The objects of one kind; who watches hears of what is applied and deleted."""

    def __init__(self, *objects: KubernetesObject) -> None:
        self._objects: dict[ObjectKey, KubernetesObject] = {key_of(one): one for one in objects}
        self._events: list[Mapping[str, Any]] = []
        self._changed = asyncio.Condition()

    async def apply(self, one: KubernetesObject) -> None:
        self._objects[key_of(one)] = one
        await self._happened("MODIFIED", one)

    async def delete(self, one: KubernetesObject) -> None:
        del self._objects[key_of(one)]
        await self._happened("DELETED", one)

    async def list(self) -> tuple[list[KubernetesObject], str]:
        return list(self._objects.values()), str(len(self._events))

    async def watch(self, resource_version: str) -> AsyncIterator[Mapping[str, Any]]:
        seen = int(resource_version)
        while True:
            async with self._changed:
                while len(self._events) <= seen:
                    await self._changed.wait()
            yield self._events[seen]
            seen += 1

    async def _happened(self, kind: str, one: KubernetesObject) -> None:
        async with self._changed:
            version = {"resourceVersion": str(len(self._events) + 1)}
            self._events.append({"type": kind, "object": {**one, "metadata": {**one["metadata"], **version}}})
            self._changed.notify_all()


def manifest(
    name: str,
    *,
    namespace: str = "models",
    created: str = "2026-11-21T10:00:00Z",
    model: str | None = None,
    aliases: tuple[str, ...] = (),
    adapters: tuple[str, ...] = (),
    mode: str = "gateway",
    policy: str = "finishTime",
    max_queue_size: int = 1000,
    max_queue_wait: str = "60s",
    **spec: Any,
) -> dict[str, Any]:
    """An InferenceService as the API server gives it, with the fields that concern a gateway."""
    return {
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": created, "resourceVersion": "1"},
        "spec": {
            "model": {"source": "pvc://models", "aliases": list(aliases)} | ({} if model is None else {"name": model}),
            "engine": {"adapters": {"list": [{"name": adapter} for adapter in adapters]}} if adapters else {},
            "router": {
                "mode": mode,
                "policy": policy,
                "maxQueueSize": max_queue_size,
                "maxQueueWait": max_queue_wait,
            },
            **spec,
        },
    }


def engine_slice(
    service: str, *ports: int, namespace: str = "models", host: str = "127.0.0.1", name: str = ""
) -> dict[str, Any]:
    """Of a service's engines on this machine. A slice has one port, so each is listed with the first of them."""
    return {
        "metadata": {
            "name": name or f"{service}-engines",
            "namespace": namespace,
            "labels": {SERVICE_LABEL: service, ROLE_LABEL: "serve"},
            "resourceVersion": "1",
        },
        "ports": [{"name": "http", "port": port} for port in ports],
        "endpoints": [{"addresses": [host], "conditions": {"ready": True}}] if ports else [],
    }
