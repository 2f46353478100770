"""A client that answers for services, their children and pods from what watches have shown, and what it wrote."""

from collections.abc import Awaitable, Callable

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
    NamespacedName,
    ServiceKey,
)
from kvasir_operator.observe.cache import InformerCache


class CachedClient(KubeClient):
    """Whatever the cache does not know yet is asked of the API server."""

    def __init__(self, configuration: Configuration, cache: InformerCache, hooks: ClientHooks | None = None) -> None:
        super().__init__(configuration, hooks)
        self._cache = cache

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        if kind != INFERENCE_SERVICE:
            return await super().get(kind, namespace, name)
        found = self._cache.read(kind, ServiceKey(namespace, name))
        if found is None:  # a list of one, for which the right to list them is enough
            found = await super().list(kind, namespace, fields=f"metadata.name={name}")
        return found[0] if found else None

    async def list(
        self, kind: Kind, namespace: str | None, labels: LabelSelector | None = None, fields: str | None = None
    ) -> list[KubeObject]:
        service, found = (labels or {}).get(SERVICE_LABEL), None
        if kind == INFERENCE_SERVICE and labels is None and fields is None:
            found = self._cache.read_all(kind, namespace)
        elif namespace is not None and service is not None and labels == {SERVICE_LABEL: service} and fields is None:
            found = self._cache.read(kind, ServiceKey(namespace, service))
        return await super().list(kind, namespace, labels, fields) if found is None else found

    async def _write(
        self, verb: str, kind: Kind, namespace: str, name: str, call: Callable[[], Awaitable[KubeObject]]
    ) -> KubeObject:
        own = NamespacedName(namespace, name)
        with self._cache.writing(kind, own):
            try:
                result = await super()._write(verb, kind, namespace, name, call)
            except ObjectNotFoundError:
                self._cache.remove_own(kind, own)
                raise
        if verb != "delete" and kind in (INFERENCE_SERVICE, *LISTED_CHILD_KINDS):
            self._cache.put_own(kind, result)
        elif verb == "delete" and kind != POD:  # which is there until its grace ends
            self._cache.remove_own(kind, own)
        return result
