"""The seam to the Kubernetes API: the few calls that the operator makes, on kubernetes.aio's dynamic client.

Objects go in and come out as plain dicts; library and transport errors leave as this package's own. Every write
passes through `KubeClient._write`, where it is counted, and where a test may count or break it.
"""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import client as aio_client
from kubernetes.aio import config as aio_config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.errors import (
    KubeApiError,
    KubeForbiddenError,
    KubeUnavailableError,
    KvasirOperatorError,
    ObjectConflictError,
    ObjectNotFoundError,
    ObjectRefusedError,
    WatchExpiredError,
)
from kvasir_operator.kinds import Kind, KubeObject, kind_of

# Owns `spec.replicas` where an autoscaler does, so that leaving the field out of an apply does not reset it.
SCALING_FIELD_MANAGER = f"{FIELD_MANAGER}-scaling"
REQUEST_TIMEOUT_SECONDS = 30.0
PAGE_SIZE = 200
"""Objects of a list that are in memory at once."""

_MERGE_PATCH = "application/merge-patch+json"
_ERRORS: dict[int, type[KubeApiError]] = {
    400: ObjectRefusedError,
    403: KubeForbiddenError,
    404: ObjectNotFoundError,
    409: ObjectConflictError,
    410: WatchExpiredError,
    413: ObjectRefusedError,
    422: ObjectRefusedError,
}


async def load_configuration(kubeconfig: str | None) -> aio_client.Configuration:
    """Address and credentials: of the file if given, else the pod's own, else of KUBECONFIG or ~/.kube/config.

    Raises KvasirOperatorError when none of them can be read.
    """
    configuration = aio_client.Configuration()
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            aio_config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            await aio_config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, client_configuration=configuration
            )
    except (aio_config.ConfigException, OSError) as error:
        where = kubeconfig or "a pod's service account, KUBECONFIG or ~/.kube/config"
        raise KvasirOperatorError(f"cannot read the cluster's address and credentials from {where}: {error}") from error
    # aiohttp would look for ~/.netrc and the proxy's variables at every request, which doubles what a request costs.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.proxy = configuration.proxy or proxy_of(configuration.host)
    return configuration


def proxy_of(server: str) -> str | None:
    """What the environment says of the way to the API server."""
    address = urlsplit(server)
    return None if proxy_bypass(address.netloc) else getproxies().get(address.scheme)


class KubeClient:
    """Reads and writes objects. `on_write(verb, kind)` is called for every write that the API server accepted."""

    def __init__(
        self, configuration: aio_client.Configuration, on_write: Callable[[str, str], None] | None = None
    ) -> None:
        self._api = aio_client.ApiClient(configuration)
        self._dynamic = DynamicClient(self._api)  # type: ignore[no-untyped-call]
        self._resources: dict[Kind, Any] = {}
        self._on_write = on_write

    async def close(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        """None when there is no such object; raises ObjectNotFoundError never, other KubeApiErrors as they come."""
        try:
            found: KubeObject = await self._send(self._resource(kind).get, name=name, namespace=namespace)
        except ObjectNotFoundError:
            return None
        return found

    async def list_pages(
        self, kind: Kind, namespace: str | None, selector: str | None = None, fields: str | None = None
    ) -> AsyncIterator[KubeObject]:
        """List objects page by page; `namespace` None is all. The pages' items carry apiVersion and kind.

        `selector` is by label, `fields` a field selector.
        """
        token = None
        while True:
            page = await self._send(
                self._resource(kind).get,
                namespace=namespace,
                label_selector=selector,
                field_selector=fields,
                limit=PAGE_SIZE,
                _continue=token,
            )
            for item in page.get("items") or []:
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.kind)
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return

    async def list(
        self, kind: Kind, namespace: str | None, selector: str | None = None, fields: str | None = None
    ) -> list[KubeObject]:
        pages = self.list_pages(kind, namespace, selector, fields)
        return [item async for page in pages for item in page.get("items") or []]

    async def watch(
        self, kind: Kind, namespace: str | None, selector: str, resource_version: str, seconds: float
    ) -> AsyncIterator[dict[str, Any]]:
        """Events (`type`, `object`) after `resource_version`, bookmarks too, until the server ends the watch.

        Raises WatchExpiredError when the version is too old.
        """
        # Bookmarks come every minute at the latest: a stream that is silent for longer is dead.
        timeout = aiohttp.ClientTimeout(total=seconds + REQUEST_TIMEOUT_SECONDS, sock_read=90.0)
        response = await self._send(
            self._resource(kind).get,
            namespace=namespace,
            label_selector=selector,
            resource_version=resource_version,
            timeout_seconds=int(seconds),
            watch=True,
            query_params=[("allowWatchBookmarks", "true")],
            serialize=False,
            _request_timeout=timeout,
        )
        try:
            async for line in response.content:
                yield read_watch_line(line)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise KubeUnavailableError(f"watch of {kind.plural} broke off: {error!r}") from error
        finally:
            response.close()

    async def apply(self, obj: KubeObject, field_manager: str = FIELD_MANAGER) -> KubeObject:
        """Server-side apply; takes over fields that others own. Returns the object as it is now stored."""
        kind, metadata = kind_of(obj), obj["metadata"]
        return await self._write(
            "apply",
            kind,
            lambda: self._resource(kind).server_side_apply(
                body=obj, namespace=metadata["namespace"], field_manager=field_manager, force_conflicts=True, **_RAW
            ),
        )

    async def merge_status(self, kind: Kind, namespace: str, name: str, status: dict[str, Any]) -> KubeObject:
        """JSON merge patch of the status subresource: None removes a key."""
        return await self._write(
            "patch_status",
            kind,
            lambda: self._resource(kind).status.patch(
                body={"status": status}, name=name, namespace=namespace, content_type=_MERGE_PATCH,
                field_manager=FIELD_MANAGER, **_RAW,
            ),
        )  # fmt: skip

    async def merge(self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]) -> KubeObject:
        return await self._write(
            "patch",
            kind,
            lambda: self._resource(kind).patch(
                body=patch, name=name, namespace=namespace, content_type=_MERGE_PATCH, field_manager=FIELD_MANAGER,
                **_RAW,
            ),
        )  # fmt: skip

    async def create(self, obj: KubeObject) -> KubeObject:
        """Raises ObjectConflictError when it exists."""
        kind = kind_of(obj)
        namespace = obj["metadata"]["namespace"]
        return await self._write(
            "create",
            kind,
            lambda: self._resource(kind).create(body=obj, namespace=namespace, field_manager=FIELD_MANAGER, **_RAW),
        )

    async def replace(self, obj: KubeObject) -> KubeObject:
        """Raises ObjectConflictError when it changed since `metadata.resourceVersion`."""
        kind = kind_of(obj)
        namespace = obj["metadata"]["namespace"]
        return await self._write(
            "replace",
            kind,
            lambda: self._resource(kind).replace(body=obj, namespace=namespace, field_manager=FIELD_MANAGER, **_RAW),
        )

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes the object while it has this UID; one that is gone, or another by now, is no error."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._write(
                "delete", kind, lambda: self._resource(kind).delete(name=name, namespace=namespace, body=body, **_RAW)
            )
        except (ObjectNotFoundError, ObjectConflictError):
            return

    async def _write(self, verb: str, kind: Kind, call: Callable[[], Awaitable[Any]]) -> KubeObject:
        result = await _translated(call)
        if self._on_write is not None:
            self._on_write(verb, kind.kind)
        return dict(result)

    async def _send(self, call: Callable[..., Awaitable[Any]], **arguments: Any) -> Any:
        return await _translated(lambda: call(**{**_RAW, **arguments}))

    def _resource(self, kind: Kind) -> Any:
        if kind not in self._resources:
            self._resources[kind] = Resource(  # type: ignore[no-untyped-call]
                prefix="apis" if kind.group else "api",
                group=kind.group,
                api_version=kind.version,
                kind=kind.kind,
                name=kind.plural,
                namespaced=True,
                client=self._dynamic,
                subresources={"status": {"kind": kind.kind, "name": f"{kind.plural}/status", "namespaced": True}},
            )
        return self._resources[kind]


_RAW: dict[str, Any] = {
    "serializer": lambda _client, data: data,
    "_request_timeout": aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS),
}


async def _translated(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except ApiException as error:
        raise _ERRORS.get(error.status, KubeUnavailableError)(_message(error), error.status) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise KubeUnavailableError(f"the API server did not answer: {error!r}") from error


def _message(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, TypeError, KeyError):
        return f"{error.status} {error.reason}"


def read_watch_line(line: bytes) -> dict[str, Any]:
    """One event of a watch; raises WatchExpiredError or KubeUnavailableError for one that says so."""
    event: dict[str, Any] = json.loads(line)
    if event["type"] == "ERROR":
        status = event["object"]
        error = WatchExpiredError if status.get("code") == 410 else KubeUnavailableError
        raise error(str(status.get("message")), status.get("code"))
    return event
