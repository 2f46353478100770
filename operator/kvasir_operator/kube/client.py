"""The seam to the Kubernetes API: the few calls that the operator makes, on kubernetes.aio.

Lists and watches go through its dynamic client. What is of one object goes past it, through kube/session.py.

Objects go in and come out as plain dicts; library and transport errors leave as this package's own. Every request
passes through `KubeClient._about`, where `ClientHooks.on_request` is told of it.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio import client as aio_client
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from kvasir_operator.api.labels import FIELD_MANAGER, selector_text
from kvasir_operator.errors import (
    KindNotServedError,
    KubeApiError,
    KubeUnavailableError,
    ObjectConflictError,
    ObjectNotFoundError,
    described,
)
from kvasir_operator.kube.answers import api_error, read_watch_line, translated
from kvasir_operator.kube.kinds import OPTIONAL_KINDS, Kind, KubeObject, ServiceKey, kind_of
from kvasir_operator.kube.session import REQUEST_TIMEOUT_SECONDS, Session

LabelSelector: TypeAlias = Mapping[str, str | None]
"""Labels that an object must have; None stands for any value."""
PAGE_SIZE = 200
"""Objects of a list that are in memory at once."""

_JSON, _MERGE_PATCH, _APPLY_PATCH = "application/json", "application/merge-patch+json", "application/apply-patch+yaml"
_FORCED = {"force": "true"}
_OWN = {"fieldManager": FIELD_MANAGER}
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class ClientHooks:
    """What a client's owner wants to know of its requests."""

    before_write: Callable[[], None] = lambda: None
    """May raise: then nothing is sent. Asked when a write begins, and again when there is a connection for it."""
    on_request: Callable[[str, str, Exception | None], None] = lambda verb, kind, error: None
    """Called with the verb and the kind of every request for objects, and what came of it: None is success."""
    on_kind_not_served: Callable[[], None] = lambda: None
    """The API server did not know an optional kind."""


class KubeClient:
    """Reads and writes objects."""

    def __init__(
        self, configuration: aio_client.Configuration, hooks: ClientHooks | None = None, page_size: int = PAGE_SIZE
    ) -> None:
        self._page_size = page_size
        self._hooks = hooks or ClientHooks()
        self._api = aio_client.ApiClient(configuration)
        self._session = Session(self._api, self._hooks.before_write)
        self._dynamic = DynamicClient(self._api)  # type: ignore[no-untyped-call]
        self._resources: dict[Kind, Any] = {}

    def now(self) -> str:
        """By the API server's clock, as of its last answer about a single object (RFC 3339)."""
        return self._session.now().strftime("%Y-%m-%dT%H:%M:%SZ")

    async def close(self) -> None:
        await self._session.close()
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        """None when there is no such object; raises ObjectNotFoundError never, other KubeApiErrors as they come."""
        try:
            found: KubeObject = await self._about("get", kind, partial(self._ask, "GET", kind, namespace, name))
        except ObjectNotFoundError:
            return None
        return found

    async def read_path(self, path: str) -> dict[str, Any]:
        """What the API server says of itself: its version, or the kinds of an API group."""
        found: dict[str, Any] = await translated(lambda: self._dynamic.request("get", path, **_RAW))
        return found

    async def list_pages(
        self, kind: Kind, namespace: str | None, labels: LabelSelector | None = None, fields: str | None = None
    ) -> AsyncIterator[KubeObject]:
        """List objects page by page; `namespace` None is all. The pages' items carry apiVersion and kind.

        `fields` is a field selector.
        """
        token = None
        while True:
            page = await self._send(
                "list",
                kind,
                self._resource(kind).get,
                namespace=namespace,
                label_selector=None if labels is None else selector_text(labels),
                field_selector=fields,
                limit=self._page_size,
                _continue=token,
            )
            for item in page.get("items") or []:
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.kind)
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return

    def known(self, kind: Kind, service: ServiceKey) -> Sequence[KubeObject] | None:
        """Of a service, where that takes no request."""
        return None

    async def list(
        self, kind: Kind, namespace: str | None, labels: LabelSelector | None = None, fields: str | None = None
    ) -> list[KubeObject]:
        pages = self.list_pages(kind, namespace, labels, fields)
        return [item async for page in pages for item in page.get("items") or []]

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        labels: LabelSelector,
        resource_version: str,
        seconds: float,
        fields: str | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Events (`type`, `object`) after `resource_version`, bookmarks too, until the server ends the watch.

        `fields` is a field selector. Raises WatchExpiredError when the version is too old.
        """
        # Bookmarks come every minute at the latest: a stream that is silent for longer is dead.
        timeout = aiohttp.ClientTimeout(total=seconds + REQUEST_TIMEOUT_SECONDS, sock_read=90.0)
        response = await self._send(
            "watch",
            kind,
            self._resource(kind).get,
            namespace=namespace,
            label_selector=selector_text(labels) or None,
            field_selector=fields,
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
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise KubeUnavailableError(f"watch of {kind.plural} broke off: {described(error)}") from error
        finally:
            response.close()

    async def apply(self, obj: KubeObject, field_manager: str = FIELD_MANAGER) -> KubeObject:
        """Server-side apply; takes over fields that others own. Returns the object as it is now stored."""
        return await self._change("apply", "PATCH", obj, {"fieldManager": field_manager, **_FORCED}, _APPLY_PATCH)

    async def dry_run(self, obj: KubeObject, field_manager: str = FIELD_MANAGER) -> KubeObject:
        """What `apply` would store, after defaults and admission; nothing is stored, so it counts as no write."""
        kind, metadata = kind_of(obj), obj["metadata"]
        query = {"fieldManager": field_manager, **_FORCED, "dryRun": "All"}
        call = partial(
            self._ask, "PATCH", kind, metadata["namespace"], metadata["name"], query, obj, content_type=_APPLY_PATCH
        )
        return dict(await self._about("dry_run", kind, call))

    async def apply_status(self, obj: KubeObject) -> KubeObject:
        """Server-side apply of the status subresource.

        Raises ObjectConflictError when the object is not as it was at `metadata.resourceVersion`. A UID alone is no
        precondition here: the API server does not look at it in an apply of a status.
        """
        return await self._change("apply_status", "PATCH", obj, {**_OWN, **_FORCED}, _APPLY_PATCH, "status")

    async def merge(self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]) -> KubeObject:
        call = partial(self._ask, "PATCH", kind, namespace, name, _OWN, patch, content_type=_MERGE_PATCH)
        return await self._write("patch", kind, namespace, name, call)

    async def create(self, obj: KubeObject) -> KubeObject:
        """Raises ObjectConflictError when it exists."""
        kind, namespace, name = kind_of(obj), obj["metadata"]["namespace"], obj["metadata"]["name"]
        call = partial(self._ask, "POST", kind, namespace, None, _OWN, obj)
        return await self._write("create", kind, namespace, name, call)

    async def replace(self, obj: KubeObject) -> KubeObject:
        """Raises ObjectConflictError when it changed since `metadata.resourceVersion`."""
        return await self._change("replace", "PUT", obj, _OWN)

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
        """Deletes the object while it has this UID. False where another has the name by now, which is no error.

        `grace_seconds`: of a pod; 0 does not wait for its node, None leaves what its spec says. `is_foreground`: it is
        there until all that it owns has gone.
        """
        policy = "Foreground" if is_foreground else "Background"
        body: dict[str, Any] = {"preconditions": {"uid": uid}, "propagationPolicy": policy}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            call = partial(self._ask, "DELETE", kind, namespace, name, body=body)
            await self._write("delete", kind, namespace, name, call)
        except ObjectNotFoundError:
            return True
        except ObjectConflictError:
            return False
        return True

    async def _change(
        self,
        verb: str,
        method: str,
        obj: KubeObject,
        query: Mapping[str, str],
        content_type: str = _JSON,
        subresource: str | None = None,
    ) -> KubeObject:
        """A write of an object that names itself."""
        kind, namespace, name = kind_of(obj), obj["metadata"]["namespace"], obj["metadata"]["name"]
        call = partial(
            self._ask, method, kind, namespace, name, query, obj, content_type=content_type, subresource=subresource
        )
        return await self._write(verb, kind, namespace, name, call)

    async def _ask(
        self,
        method: str,
        kind: Kind,
        namespace: str,
        name: str | None,
        query: Mapping[str, str] = _NOTHING,
        body: KubeObject | None = None,
        *,
        content_type: str = _JSON,
        subresource: str | None = None,
    ) -> KubeObject:
        """One request about one object, or to a kind's collection where `name` is None. Raises KubeApiError."""
        path = self._resource(kind).path(name=name, namespace=namespace)
        if subresource is not None:
            path = f"{path}/{subresource}"
        if query:
            path = f"{path}?{urlencode(query)}"
        answer = await self._session.send(method, path, body, content_type)
        if not answer.is_success:
            raise api_error(answer.status, answer.reason, answer.content.decode(errors="replace"))
        found: KubeObject = msgspec.json.decode(answer.content)
        return found

    async def _write(
        self, verb: str, kind: Kind, namespace: str, name: str, call: Callable[[], Awaitable[Any]]
    ) -> KubeObject:
        self._hooks.before_write()
        return dict(await self._about(verb, kind, call))

    async def _send(self, verb: str, kind: Kind, call: Callable[..., Awaitable[Any]], **arguments: Any) -> Any:
        return await self._about(verb, kind, lambda: call(**{**_RAW, **arguments}))

    async def _about(self, verb: str, kind: Kind, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            result = await translated(call)
        except KubeApiError as error:
            self._hooks.on_request(verb, kind.kind, error)
            if isinstance(error, KindNotServedError) and kind in OPTIONAL_KINDS:
                self._hooks.on_kind_not_served()
            raise
        self._hooks.on_request(verb, kind.kind, None)
        return result

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
            )
        return self._resources[kind]


_RAW: dict[str, Any] = {
    "serializer": lambda _client, data: data,
    "_request_timeout": aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS),
}
