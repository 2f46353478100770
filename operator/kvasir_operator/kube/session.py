"""Requests to the API server, on an aiohttp session.

kubernetes' generated client does as much again around each request: it copies the headers, looks for files and retries,
and has aiohttp warn of its timeout. Its configuration says where to and with which credentials.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import aiohttp
import msgspec
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.kube.answers import api_error, read_object, translated
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.server_clock import ServerClock

REQUEST_TIMEOUT_SECONDS: Final = 30.0
_TIMEOUT: Final = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
JSON: Final = "application/json"
_LONGEST_LINE_BYTES: Final = 2**21
"""Of a watch, an event: an object is smaller."""


class Session:
    """Opened by the first request, in whose event loop it lives."""

    def __init__(self, configuration: Configuration, before_write: Callable[[], None]) -> None:
        """`before_write` may raise: then no write is sent."""
        self._configuration = configuration
        self._ssl_context = RESTClientObject(configuration).ssl_context
        self._before_write = before_write
        self._opened: aiohttp.ClientSession | None = None
        self.clock = ServerClock()
        """The API server's: times of objects are by it."""

    async def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] = _NOTHING,
        body: KubeObject | None = None,
        content_type: str = JSON,
        key: str | None = None,
    ) -> KubeObject:
        """The answer's JSON, with the object `key`, if any. Raises KubeApiError."""
        async with self.open(method, path, query, body, content_type) as response:
            return read_object(await response.read(), key)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] = _NOTHING,
        body: KubeObject | None = None,
        content_type: str = JSON,
        client_timeout: aiohttp.ClientTimeout = _TIMEOUT,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is still to be read. Raises KubeApiError for one that is none of success, and within."""
        configuration = self._configuration
        headers = {"Accept": JSON, "Content-Type": content_type, "User-Agent": FIELD_MANAGER}
        with translated():
            # Read again once it was renewed on disk.
            if token := await configuration.get_api_key_with_prefix("BearerToken"):
                headers["Authorization"] = token
            async with self._session().request(
                method,
                f"{configuration.host}{path}",
                params=query,
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=client_timeout,
                proxy=configuration.proxy,
                proxy_headers=configuration.proxy_headers,
                server_hostname=configuration.tls_server_name or None,
                read_bufsize=_LONGEST_LINE_BYTES,
            ) as response:
                self.clock.note(response.headers.get("Date"))
                if not 200 <= response.status < 300:
                    text = (await response.read()).decode(errors="replace")
                    raise api_error(response.status, response.reason or "", text)
                yield response

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            # Without a limit, which the watches of many namespaces would come to: workers bound what else there is.
            connector = aiohttp.TCPConnector(limit=0, ssl=self._ssl_context)
            guard = write_guard(self._before_write)
            self._opened = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trace_configs=[guard]
            )
        return self._opened


def write_guard(before_write: Callable[[], None]) -> aiohttp.TraceConfig:
    """Asks once more whether a write may be sent when there is a connection for it, right before it leaves.

    A process that was paused while it waited for one (or its whole node was) would otherwise send on waking what
    another leader has gone beyond. What was on the wire by then, the API server has had before the Lease ran out.
    `before_write` may raise: then nothing is sent, and the request fails with what it raised.
    """

    async def begin(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
        context.is_write = params.method != "GET"

    async def connected(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
        if context.is_write:
            before_write()

    guard = aiohttp.TraceConfig()
    guard.on_request_start.append(begin)
    guard.on_connection_create_end.append(connected)
    guard.on_connection_reuseconn.append(connected)
    return guard
