"""The seam to the Kubernetes API: the few calls that the operator makes.

Objects go in and come out as plain dicts; transport errors leave as this package's own. Every request about objects
passes through `KubeClient._about`, where `ClientHooks.on_request` is told of it.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import aiohttp
from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import FIELD_MANAGER, selector_text
from kvasir_operator.errors import KindNotServedError, KubeApiError, ObjectConflictError, ObjectNotFoundError
from kvasir_operator.kube.answers import read_watch_line
from kvasir_operator.kube.kinds import OPTIONAL_KINDS, Kind, KubeObject, kind_of
from kvasir_operator.kube.session import JSON, REQUEST_TIMEOUT_SECONDS, Session

Found = TypeVar("Found")
LabelSelector: TypeAlias = Mapping[str, str | None]
"""Labels that an object must have; None stands for any value."""
PAGE_SIZE = 200
"""Objects of a list that are in memory at once."""

_MERGE_PATCH, _APPLY_PATCH = "application/merge-patch+json", "application/apply-patch+yaml"
_FORCED = {"force": "true"}
_OWN = {"fieldManager": FIELD_MANAGER}


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
        self, configuration: Configuration, hooks: ClientHooks | None = None, page_size: int = PAGE_SIZE
    ) -> None:
        self._page_size = page_size
        self._hooks = hooks or ClientHooks()
        self._session = Session(configuration, self._hooks.before_write)

    def now(self) -> str:
        """By the API server's clock, as of its last answer about a single object (RFC 3339)."""
        return self._session.clock.text()

    def unix(self) -> float:
        """The same in seconds since 1970."""
        return self._session.clock.unix()

    async def close(self) -> None:
        await self._session.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        """None when there is no such object; raises ObjectNotFoundError never, other KubeApiErrors as they come."""
        try:
            call = partial(self._session.send, "GET", _path(kind, namespace, name), key="metadata")
            return await self._about("get", kind, call)
        except ObjectNotFoundError:
            return None

    async def read_path(self, path: str) -> dict[str, Any]:
        """What the API server says of itself, such as the kinds of an API group."""
        return await self._session.send("GET", path)

    async def list_pages(
        self, kind: Kind, namespace: str | None, labels: LabelSelector | None = None, fields: str | None = None
    ) -> AsyncIterator[KubeObject]:
        """List objects page by page; `namespace` None is all. The pages' items carry apiVersion and kind.

        `fields` is a field selector.
        """
        query = {"limit": str(self._page_size), **_selectors(labels, fields)}
        while True:
            call = partial(self._session.send, "GET", _path(kind, namespace), query, key="metadata")
            page = await self._about("list", kind, call)
            for item in page.get("items") or []:
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.kind)
            yield page
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return

    async def list(
        self, kind: Kind, namespace: str | None, labels: LabelSelector | None = None, fields: str | None = None
    ) -> list[KubeObject]:
        pages = self.list_pages(kind, namespace, labels, fields)
        return [item async for page in pages for item in page.get("items") or []]

    async def watch(
        self, kind: Kind, namespace: str | None, labels: LabelSelector, resource_version: str, seconds: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Events (`type`, `object`) after `resource_version`, bookmarks too, until the server ends the watch.

        Raises WatchExpiredError when the version is too old.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(int(seconds)),
            **_selectors(labels),
        }
        # Bookmarks come every minute at the latest: a stream that is silent for longer is dead.
        timeout = aiohttp.ClientTimeout(total=seconds + REQUEST_TIMEOUT_SECONDS, sock_read=90.0)
        opening = self._session.open("GET", _path(kind, namespace), query, client_timeout=timeout)
        async with AsyncExitStack() as stack:
            response = await self._about("watch", kind, partial(stack.enter_async_context, opening))
            async for line in response.content:
                yield read_watch_line(line)

    async def apply(self, obj: KubeObject, field_manager: str = FIELD_MANAGER) -> KubeObject:
        """Server-side apply; takes over fields that others own. Returns the object as it is now stored."""
        return await self._change("apply", "PATCH", obj, {"fieldManager": field_manager, **_FORCED}, _APPLY_PATCH)

    async def dry_run(self, obj: KubeObject, field_manager: str = FIELD_MANAGER) -> KubeObject:
        """What `apply` would store, after defaults and admission; nothing is stored, so it counts as no write."""
        query = {"fieldManager": field_manager, **_FORCED, "dryRun": "All"}
        return await self._about(
            "dry_run", kind_of(obj), partial(self._session.send, "PATCH", _path_of(obj), query, obj, _APPLY_PATCH)
        )

    async def apply_status(self, obj: KubeObject) -> KubeObject:
        """Server-side apply of the status subresource.

        Raises ObjectConflictError when the object is not as it was at `metadata.resourceVersion`. A UID alone is no
        precondition here: the API server does not look at it in an apply of a status.
        """
        return await self._change("apply_status", "PATCH", obj, {**_OWN, **_FORCED}, _APPLY_PATCH, "/status")

    async def merge(self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]) -> KubeObject:
        call = partial(self._session.send, "PATCH", _path(kind, namespace, name), _OWN, patch, _MERGE_PATCH)
        return await self._write("patch", kind, namespace, name, call)

    async def create(self, obj: KubeObject) -> KubeObject:
        """Raises ObjectConflictError when it exists."""
        kind, namespace, name = kind_of(obj), obj["metadata"]["namespace"], obj["metadata"]["name"]
        call = partial(self._session.send, "POST", _path(kind, namespace), _OWN, obj)
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
    ) -> None:
        """Deletes the object while it has this UID. That it is gone, or another has the name by now, is no error.

        `grace_seconds`: of a pod; 0 does not wait for its node, None leaves what its spec says. `is_foreground`: it is
        there until all that it owns has gone.
        """
        policy = "Foreground" if is_foreground else "Background"
        body: dict[str, Any] = {"preconditions": {"uid": uid}, "propagationPolicy": policy}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        call = partial(self._session.send, "DELETE", _path(kind, namespace, name), body=body)
        with suppress(ObjectNotFoundError, ObjectConflictError):
            await self._write("delete", kind, namespace, name, call)

    async def _change(
        self,
        verb: str,
        method: str,
        obj: KubeObject,
        query: Mapping[str, str],
        content_type: str = JSON,
        below: str = "",
    ) -> KubeObject:
        """A write of an object that names itself, or of the subresource `below` it."""
        call = partial(self._session.send, method, _path_of(obj) + below, query, obj, content_type)
        return await self._write(verb, kind_of(obj), obj["metadata"]["namespace"], obj["metadata"]["name"], call)

    async def _write(
        self, verb: str, kind: Kind, namespace: str, name: str, call: Callable[[], Awaitable[KubeObject]]
    ) -> KubeObject:
        self._hooks.before_write()
        return await self._about(verb, kind, call)

    async def _about(self, verb: str, kind: Kind, call: Callable[[], Awaitable[Found]]) -> Found:
        try:
            result = await call()
        except KubeApiError as error:
            self._hooks.on_request(verb, kind.kind, error)
            if isinstance(error, KindNotServedError) and kind in OPTIONAL_KINDS:
                self._hooks.on_kind_not_served()
            raise
        self._hooks.on_request(verb, kind.kind, None)
        return result


def _path(kind: Kind, namespace: str | None, name: str | None = None) -> str:
    """Of a kind's collection, in all namespaces where that is None, or of one object of it."""
    root = f"/{'apis' if kind.group else 'api'}/{kind.api_version}"
    collection = f"{root}/{kind.plural}" if namespace is None else f"{root}/namespaces/{namespace}/{kind.plural}"
    return collection if name is None else f"{collection}/{name}"


def _path_of(obj: KubeObject) -> str:
    return _path(kind_of(obj), obj["metadata"]["namespace"], obj["metadata"]["name"])


def _selectors(labels: LabelSelector | None, fields: str | None = None) -> dict[str, str]:
    found = {"labelSelector": selector_text(labels or {}), "fieldSelector": fields or ""}
    return {name: text for name, text in found.items() if text}
