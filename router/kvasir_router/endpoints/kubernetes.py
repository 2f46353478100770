"""The engines of a service, followed through their EndpointSlices: list, watch from there, list again when too old.

What the slices say is read in `slices`. While the API is out of reach the last known set of endpoints stays.
Protocol: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import aiohttp

from kvasir_router.endpoints.endpoint import Address
from kvasir_router.endpoints.slices import TRAFFIC_WEIGHT_LABEL, EndpointSlice, addresses_of, traffic_weight
from kvasir_router.errors import ConfigError, RouterError

logger = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 10.0


class ResourceExpiredError(RouterError):
    """The watch's resourceVersion is no longer held by the API server: list again."""


class WatchFailedError(RouterError):
    """The API server refused or broke a call; it is repeated after a while."""


@dataclass(frozen=True)
class ServiceReference:
    """An InferenceService, or whatever else carries its name in the service label."""

    namespace: str
    name: str
    port: str  # the engines' port: a number, or the name of a port of their Services

    @classmethod
    def parse(cls, text: str) -> Self:
        match = re.fullmatch(r"([a-z0-9-]+)/([a-z0-9-]+):([a-z0-9-]+)", text)
        if match is None:
            raise ConfigError(f"--endpoints-service {text!r} is not NAMESPACE/NAME:PORT, for example models/llama:8000")
        return cls(*match.groups())


class SliceApi(Protocol):
    """The two calls on the Kubernetes API; tests put recorded events here."""

    async def list(self) -> tuple[list[EndpointSlice], str]:
        """All slices of the service and the resourceVersion to watch from."""
        ...

    def watch(self, resource_version: str) -> AsyncIterator[Mapping[str, Any]]:
        """Events {type, object} until the server ends the watch."""
        ...


class KubernetesSource:
    """Publishes every change of the service's usable addresses. Readiness is Kubernetes' to tell, so it is trusted."""

    is_trusted_ready = True

    def __init__(self, api: SliceApi, port: str, retry_seconds: float = 0.5) -> None:
        self._api = api
        self._port = port
        self._retry_seconds = retry_seconds
        self._slices: dict[str, EndpointSlice] = {}
        self.synced = asyncio.Event()

    async def run(self, publish: Callable[[frozenset[Address]], None]) -> None:
        """Runs until cancelled; failures of the API are logged and tried again with back-off."""
        delay = self._retry_seconds
        while True:
            try:
                resource_version = await self._list(publish)
                delay = self._retry_seconds
                await self._follow(resource_version, publish)
            except ResourceExpiredError:
                logger.info("EndpointSlice watch expired, listing again")
            except (WatchFailedError, aiohttp.ClientError, OSError, TimeoutError) as error:
                logger.warning("EndpointSlices cannot be read, keeping the last known endpoints: %s", error)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, _MAX_BACKOFF_SECONDS)

    async def _list(self, publish: Callable[[frozenset[Address]], None]) -> str:
        slices, resource_version = await self._api.list()
        self._slices = {}
        for endpoint_slice in slices:
            self._keep(endpoint_slice)
        publish(addresses_of(self._slices, self._port))
        self.synced.set()
        return resource_version

    async def _follow(self, resource_version: str, publish: Callable[[frozenset[Address]], None]) -> None:
        """Watches again from the last seen version whenever the server ends a watch normally."""
        while True:
            async for event in self._api.watch(resource_version):
                resource_version = event["object"]["metadata"]["resourceVersion"]
                if self._apply(event):
                    publish(addresses_of(self._slices, self._port))

    def _apply(self, event: Mapping[str, Any]) -> bool:
        """True when the event may have changed the addresses; a bookmark only carries a version."""
        name = event["object"]["metadata"].get("name", "")
        if event["type"] == "DELETED":
            return self._slices.pop(name, None) is not None
        if event["type"] in ("ADDED", "MODIFIED"):
            self._keep(event["object"])
            return True
        return False

    def _keep(self, endpoint_slice: EndpointSlice) -> None:
        name = endpoint_slice["metadata"]["name"]
        self._slices[name] = endpoint_slice
        try:
            traffic_weight(endpoint_slice)
        except ValueError as error:
            logger.warning("EndpointSlice %s: %s is ignored: %s", name, TRAFFIC_WEIGHT_LABEL, error)
