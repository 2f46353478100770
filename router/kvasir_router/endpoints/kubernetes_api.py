"""The two calls that following objects needs, on a real API server, with plain JSON instead of the client's models.

Apart from the sources because the client takes 160 ms and 11 MB to import, which fixed endpoints need not pay.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from kvasir_router.endpoints.inference_services import GROUP, PLURAL, VERSION
from kvasir_router.endpoints.kubernetes import ServiceReference
from kvasir_router.endpoints.objects import KubernetesObject
from kvasir_router.endpoints.reflector import ResourceExpiredError, WatchFailedError
from kvasir_router.endpoints.slices import ENGINES_SELECTOR, label_selector
from kvasir_router.errors import EndpointSourceError

_WATCH_SECONDS = 240
_WATCH_GRACE_SECONDS = 15
SILENT_SECONDS = 75.0
"""An API server sends a bookmark each minute where nothing else happens: after so long without a byte the connection
is dead (dropped by a load balancer or a node without a word), and engines would come and go unheard."""
_HTTP_GONE = 410
_MOST_SHOWN = 300  # bytes of an answer


@dataclass(frozen=True)
class KubernetesObjects:
    """`read` lists or watches objects of one kind; `query` says which of them; a watch that is silent for
    `silent_seconds` has failed."""

    read: Callable[..., Any]
    query: Mapping[str, Any]
    silent_seconds: float = SILENT_SECONDS

    async def list(self) -> tuple[list[KubernetesObject], str]:
        response = await self.read(**self.query, _request_timeout=30.0)
        body = await response.read()
        _check_status(response.status, body)
        with _read(body):
            parsed = json.loads(body)
            return [_trimmed(item) for item in parsed["items"] or ()], parsed["metadata"]["resourceVersion"]

    async def watch(self, resource_version: str) -> AsyncIterator[Mapping[str, Any]]:
        response = await self.read(
            **self.query,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=resource_version,
            timeout_seconds=_WATCH_SECONDS,
            _request_timeout=float(_WATCH_SECONDS + _WATCH_GRACE_SECONDS),
        )
        try:
            if response.status != 200:
                _check_status(response.status, await response.read())
            async for event in _events(response.content, self.silent_seconds):
                yield event
        finally:
            _hang_up(response)


class KubernetesApi:
    """Which objects the router follows. `client` is the connection that they share."""

    def __init__(self, api_client: client.ApiClient) -> None:
        self._discovery = client.DiscoveryV1Api(api_client)
        self._custom = client.CustomObjectsApi(api_client)

    def slices_of(self, service: ServiceReference) -> KubernetesObjects:
        """Of the service's engines."""
        query = {"namespace": service.namespace, "label_selector": label_selector(service.name)}
        return KubernetesObjects(self._discovery.list_namespaced_endpoint_slice_without_preload_content, query)

    def slices(self, namespace: str | None) -> KubernetesObjects:
        """Of all services' engines; None: of all namespaces."""
        query, discovery = {"label_selector": ENGINES_SELECTOR}, self._discovery
        if namespace is None:
            return KubernetesObjects(discovery.list_endpoint_slice_for_all_namespaces_without_preload_content, query)
        query["namespace"] = namespace
        return KubernetesObjects(discovery.list_namespaced_endpoint_slice_without_preload_content, query)

    def inference_services(self, namespace: str | None) -> KubernetesObjects:
        """None: of all namespaces."""
        query = {"group": GROUP, "version": VERSION, "plural": PLURAL}
        if namespace is None:
            return KubernetesObjects(self._custom.list_cluster_custom_object_without_preload_content, query)
        query["namespace"] = namespace
        return KubernetesObjects(self._custom.list_namespaced_custom_object_without_preload_content, query)


def _trimmed(one: KubernetesObject) -> KubernetesObject:
    """Without what is most of an object, and concerns only those who write it."""
    one["metadata"].pop("managedFields", None)
    return one


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """Drop the connection at once: after a mere close, TLS would wait for the goodbye of the server."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()


async def _events(content: aiohttp.StreamReader, silent_seconds: float) -> AsyncIterator[Mapping[str, Any]]:
    """One JSON event a line. Lines are joined by hand: a slice of 1,000 endpoints exceeds readline's limit."""
    pending = b""
    while chunk := await _next_bytes(content, silent_seconds):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield _event(line)


def _event(line: bytes) -> Mapping[str, Any]:
    """Of an object with a version. Raises ResourceExpiredError or WatchFailedError for one that says so."""
    with _read(line):
        event: dict[str, Any] = json.loads(line)
        if event["type"] == "ERROR":
            _check_status(event["object"].get("code", 500), line)
        if not _trimmed(event["object"])["metadata"]["resourceVersion"]:
            raise ValueError("an object without a version")
        return event


async def _next_bytes(content: aiohttp.StreamReader, silent_seconds: float) -> bytes:
    """Empty at the end."""
    try:
        async with asyncio.timeout(silent_seconds):
            return await content.readany()
    except TimeoutError as error:
        text = f"the watch has been silent for {silent_seconds:g} s, without the bookmark of each minute"
        raise WatchFailedError(text) from error


@contextlib.contextmanager
def _read(body: bytes) -> Iterator[None]:
    """Something in between may answer 200 with a page of its own."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        seen = body[:_MOST_SHOWN].decode(errors="replace")
        raise WatchFailedError(f"the Kubernetes API answered what is none of its objects: {seen}") from error


def _check_status(status: int, body: bytes) -> None:
    if status == _HTTP_GONE:
        raise ResourceExpiredError("410 Gone")
    if status != 200:
        raise WatchFailedError(f"the Kubernetes API answered {status}: {body[:_MOST_SHOWN].decode(errors='replace')}")


@contextlib.asynccontextmanager
async def connect() -> AsyncIterator[KubernetesApi]:
    """Connects with the pod's service account, else with KUBECONFIG. Raises EndpointSourceError without either."""
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config()  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise EndpointSourceError(
            f"the Kubernetes API is needed, but neither a service account nor KUBECONFIG works: {error}"
        ) from error
    async with client.ApiClient() as api_client:
        yield KubernetesApi(api_client)
