"""A client that answers for a service's children and pods from the cache, and puts what it writes in there at once."""

from collections.abc import Awaitable, Callable
from typing import Any

from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.child_cache import ChildCache, Name
from kvasir_operator.kinds import LISTED_CHILD_KINDS, Kind, KubeObject, ServiceKey
from kvasir_operator.kube import KubeClient


class CachedKube(KubeClient):
    """Whatever the cache does not know yet is asked of the API server."""

    def __init__(
        self, configuration: Configuration, cache: ChildCache, on_write: Callable[[str, str], None] | None = None
    ) -> None:
        super().__init__(configuration, on_write)
        self._cache = cache

    async def list(
        self, kind: Kind, namespace: str | None, selector: str | None = None, fields: str | None = None
    ) -> list[KubeObject]:
        label, _, service = (selector or "").partition("=")
        if namespace is not None and label == SERVICE_LABEL and service and fields is None:
            found = self._cache.read(kind, ServiceKey(namespace, service))
            if found is not None:
                return found
        return await super().list(kind, namespace, selector, fields)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        await super().delete(kind, namespace, name, uid)
        self._cache.remove_own(kind, Name(namespace, name))

    async def _write(self, verb: str, kind: Kind, call: Callable[[], Awaitable[Any]]) -> KubeObject:
        result = await super()._write(verb, kind, call)
        if verb != "delete" and kind in LISTED_CHILD_KINDS:
            self._cache.put_own(kind, result)
        return result
