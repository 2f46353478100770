"""The two calls that following a service needs, on a real API server, with plain JSON instead of the client's models.

Apart from `kubernetes.py` because importing the client takes most of a second, which fixed endpoints need not pay.
"""

import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from kvasir_router.endpoints.kubernetes import ResourceExpiredError, ServiceReference, WatchFailedError
from kvasir_router.endpoints.slices import EndpointSlice, label_selector
from kvasir_router.errors import EndpointSourceError

_WATCH_SECONDS = 240
_WATCH_GRACE_SECONDS = 15
_HTTP_GONE = 410


class KubernetesSliceApi:
    """The calls on a real API server, with plain JSON instead of the client's models."""

    def __init__(self, api: client.DiscoveryV1Api, service: ServiceReference) -> None:
        self._read = api.list_namespaced_endpoint_slice_without_preload_content
        self._query: dict[str, Any] = {
            "namespace": service.namespace,
            "label_selector": label_selector(service.name),
        }

    async def list(self) -> tuple[list[EndpointSlice], str]:
        response = await self._read(**self._query, _request_timeout=30.0)
        body = await response.read()
        _check_status(response.status, body)
        parsed = json.loads(body)
        return parsed["items"], parsed["metadata"]["resourceVersion"]

    async def watch(self, resource_version: str) -> AsyncIterator[Mapping[str, Any]]:
        response = await self._read(
            **self._query,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=resource_version,
            timeout_seconds=_WATCH_SECONDS,
            _request_timeout=float(_WATCH_SECONDS + _WATCH_GRACE_SECONDS),
        )
        try:
            if response.status != 200:
                _check_status(response.status, await response.read())
            async for event in _events(response.content):
                yield event
        finally:
            _hang_up(response)


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """Drop the connection at once: after a mere close, TLS would wait for the goodbye of the server."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    """One JSON event a line. Lines are joined by hand: a slice of 1,000 endpoints exceeds readline's limit."""
    pending = b""
    async for chunk in content.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["type"] == "ERROR":
                _check_status(event["object"].get("code", 500), line)
            yield event


def _check_status(status: int, body: bytes) -> None:
    if status == _HTTP_GONE:
        raise ResourceExpiredError("410 Gone")
    if status != 200:
        raise WatchFailedError(f"the Kubernetes API answered {status}: {body[:300].decode(errors='replace')}")


@contextlib.asynccontextmanager
async def connect(service: ServiceReference) -> AsyncIterator[KubernetesSliceApi]:
    """Connects with the pod's service account, else with KUBECONFIG. Raises EndpointSourceError without either."""
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config()  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise EndpointSourceError(
            f"--endpoints-service needs the Kubernetes API, but neither a service account nor KUBECONFIG works: {error}"
        ) from error
    async with client.ApiClient() as api_client:
        yield KubernetesSliceApi(client.DiscoveryV1Api(api_client), service)
