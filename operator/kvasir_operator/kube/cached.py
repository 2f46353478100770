"""A client that answers for services, their children and pods from what watches have shown, and what it wrote."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.errors import ObjectNotFoundError
from kvasir_operator.kube.client import ClientHooks, KubeClient, LabelSelector
from kvasir_operator.kube.kinds import (
    INFERENCE_SERVICE,
    LISTED_CHILD_KINDS,
    POD,
    Kind,
    KubeObject,
    ServiceKey,
)
from kvasir_operator.observe.cache import InformerCache, Name


class CachedClient(KubeClient):
    """Whatever the cache does not know yet is asked of the API server."""

    def __init__(self, configuration: Configuration, cache: InformerCache, hooks: ClientHooks | None = None) -> None:
        super().__init__(configuration, hooks)
        self._cache = cache

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        found = self._cache.read(kind, ServiceKey(namespace, name)) if kind == INFERENCE_SERVICE else None
        if found is None:
            return await super().get(kind, namespace, name)
        return found[0] if found else None

    def known(self, kind: Kind, service: ServiceKey) -> Sequence[KubeObject] | None:
        return self._cache.read(kind, service)

    async def list(
        self, kind: Kind, namespace: str | None, labels: LabelSelector | None = None, fields: str | None = None
    ) -> list[KubeObject]:
        service, found = (labels or {}).get(SERVICE_LABEL), None
        if kind == INFERENCE_SERVICE and labels is None and fields is None:
            found = self._cache.read_all(kind, namespace)
        elif namespace is not None and service is not None and labels == {SERVICE_LABEL: service} and fields is None:
            found = self._cache.read(kind, ServiceKey(namespace, service))
        return await super().list(kind, namespace, labels, fields) if found is None else found

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        uid: str,
        grace_seconds: int | None = None,
        *,
        is_foreground: bool = False,
    ) -> bool:
        is_gone = await super().delete(kind, namespace, name, uid, grace_seconds, is_foreground=is_foreground)
        # A pod is there until its grace ends. A namesake that the watch has shown already stays: nothing would show it
        # again.
        if is_gone and kind != POD:
            self._cache.remove_own(kind, Name(namespace, name))
        return is_gone

    async def apply_status(self, obj: KubeObject) -> KubeObject:
        try:
            return await super().apply_status(obj)
        except ObjectNotFoundError:
            self._cache.remove_own(INFERENCE_SERVICE, Name(obj["metadata"]["namespace"], obj["metadata"]["name"]))
            raise

    async def _write(
        self, verb: str, kind: Kind, namespace: str, name: str, call: Callable[[], Awaitable[Any]]
    ) -> KubeObject:
        with self._cache.writing(kind, Name(namespace, name)):
            result = await super()._write(verb, kind, namespace, name, call)
        if verb != "delete" and kind in (INFERENCE_SERVICE, *LISTED_CHILD_KINDS):
            self._cache.put_own(kind, result)
        return result
