"""Wakes services when their pods change: a paged list, then a watch, both by label, of pods only.

Not through kopf, so that a cluster's other pods are never decoded here. It keeps no pods, only the services that it
saw, so that those whose last pod went away while no watch was open are woken too.
"""

import asyncio
import logging
from collections.abc import Callable

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.errors import KubeApiError, WatchExpiredError
from kvasir_operator.kinds import POD, KubeObject, ServiceKey
from kvasir_operator.kube import KubeClient

logger = logging.getLogger(__name__)

WATCH_SECONDS = 300.0
_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 30.0


def service_key(obj: KubeObject) -> ServiceKey | None:
    """The service that a child or pod belongs to, by its label."""
    name = obj["metadata"].get("labels", {}).get(SERVICE_LABEL)
    return None if name is None else ServiceKey(obj["metadata"]["namespace"], name)


class PodWatch:
    """`wake` is called with the service of every pod that is there at the start or changes later."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str | None,
        wake: Callable[[ServiceKey], None],
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._wake = wake
        self._watch_seconds = watch_seconds
        self._known: set[ServiceKey] = set()
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled; an API server that does not answer is tried again with growing waits."""
        version, retry_seconds = None, _FIRST_RETRY_SECONDS
        while True:
            try:
                version = await self._list() if version is None else await self._watch(version)
                retry_seconds = _FIRST_RETRY_SECONDS
            except WatchExpiredError:
                version = None
            except KubeApiError as error:
                logger.warning("watch of pods: %s; again in %g s", error, retry_seconds)
                version = None
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, _LONGEST_RETRY_SECONDS)

    async def _list(self) -> str:
        found: set[ServiceKey] = set()
        version = ""
        async for page in self._client.list_pages(POD, self._namespace, SERVICE_LABEL):
            version = page["metadata"]["resourceVersion"]
            found.update(key for item in page.get("items") or [] if (key := service_key(item)) is not None)
        for key in found | self._known:
            self._wake(key)
        self._known = found
        self.synced.set()
        return version

    async def _watch(self, version: str) -> str:
        """Returns the version to go on from when the server ends the watch."""
        async for event in self._client.watch(POD, self._namespace, SERVICE_LABEL, version, self._watch_seconds):
            version = event["object"]["metadata"]["resourceVersion"]
            key = None if event["type"] == "BOOKMARK" else service_key(event["object"])
            if key is not None:
                self._known.add(key)
                self._wake(key)
        return version
