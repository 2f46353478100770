"""Follows all objects of one kind: list, watch from there, list again when that version is too old.

While the API is out of reach the last known objects stay.
Protocol: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from kvasir_router.endpoints.objects import KubernetesObject, ObjectKey, key_of
from kvasir_router.errors import RouterError

logger = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 10.0


class ResourceExpiredError(RouterError):
    """The watch's resourceVersion is no longer held by the API server: list again."""


class WatchFailedError(RouterError):
    """The API server refused or broke a call; it is repeated after a while."""


class ObjectApi(Protocol):
    """The two calls on the Kubernetes API; tests put recorded events here."""

    async def list(self) -> tuple[list[KubernetesObject], str]:
        """All objects and the resourceVersion to watch from."""
        ...

    def watch(self, resource_version: str) -> AsyncIterator[Mapping[str, Any]]:
        """Events {type, object} until the server ends the watch."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    before: KubernetesObject | None  # None: it is new
    now: KubernetesObject | None  # None: it is gone


class Reflector:
    """`is_synced` once its objects have been listed."""

    def __init__(self, api: ObjectApi, kind: str, retry_seconds: float = 0.5) -> None:
        self.objects: dict[ObjectKey, KubernetesObject] = {}
        self.is_synced = False
        self._api = api
        self._kind = kind
        self._retry_seconds = retry_seconds

    async def run(self, on_change: Callable[[Sequence[Change]], None]) -> None:
        """Runs until cancelled; failures of the API are logged and tried again with back-off.

        `on_change` is called after each list, and for each event that changes an object.
        """
        delay = self._retry_seconds
        while True:
            try:
                resource_version = await self._list(on_change)
                delay = self._retry_seconds
                await self._follow(resource_version, on_change)
            except ResourceExpiredError:
                logger.info("%s watch expired, listing again", self._kind)
            except (WatchFailedError, aiohttp.ClientError, OSError, TimeoutError) as error:
                text = str(error) or type(error).__name__
                logger.warning("%s cannot be read, keeping the last known ones: %s", self._kind, text)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, _MAX_BACKOFF_SECONDS)

    async def _list(self, on_change: Callable[[Sequence[Change]], None]) -> str:
        listed, resource_version = await self._api.list()
        before, self.objects = self.objects, {key_of(one): one for one in listed}
        changes = [Change(before.get(key), self.objects.get(key)) for key in before.keys() | self.objects.keys()]
        on_change([change for change in changes if change.before != change.now])
        self.is_synced = True
        return resource_version

    async def _follow(self, resource_version: str, on_change: Callable[[Sequence[Change]], None]) -> None:
        """Watches again from the last seen version whenever the server ends a watch normally."""
        while True:
            before = resource_version
            async for event in self._api.watch(resource_version):
                resource_version = event["object"]["metadata"]["resourceVersion"]
                change = self._apply(event)
                if change is not None:
                    on_change([change])
            if resource_version == before:  # whatever ends watches at once would be asked without a pause
                await asyncio.sleep(self._retry_seconds)

    def _apply(self, event: Mapping[str, Any]) -> Change | None:
        """A bookmark only carries a version."""
        if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
            return None
        key = key_of(event["object"])
        before = self.objects.pop(key, None)
        now = None if event["type"] == "DELETED" else event["object"]
        if now is not None:
            self.objects[key] = now
        return Change(before, now) if before != now else None
