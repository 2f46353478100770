"""Requests about single objects, on an aiohttp session of their own.

A burst of changes is mostly these, and kubernetes' generated client does as much again around each of them: it copies
the headers, looks for files and retries, and has aiohttp warn of its timeout.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import msgspec
from kubernetes.aio import client as aio_client
from yarl import URL

from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.kube.kinds import KubeObject

REQUEST_TIMEOUT_SECONDS: Final = 30.0
_TIMEOUT: Final = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
_JSON: Final = "application/json"
_SAME_SECONDS: Final = 2.0
"""Clocks that differ by less are one: an answer's date has whole seconds, and takes its time."""


@dataclass(frozen=True)
class Answer:
    status: int
    reason: str
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Session:
    """Opened by the first request, in whose event loop it lives. `api` says where to and with which credentials."""

    def __init__(self, api: aio_client.ApiClient, before_write: Callable[[], None]) -> None:
        """`before_write` may raise: then no write is sent."""
        self._configuration = api.configuration
        self._ssl_context = api.rest_client.ssl_context
        self._before_write = before_write
        self._opened: aiohttp.ClientSession | None = None
        self._ahead_seconds = 0.0

    async def send(self, method: str, path: str, body: KubeObject | None, content_type: str = _JSON) -> Answer:
        """`path` with its query, escaped. Raises what aiohttp raises."""
        configuration = self._configuration
        headers = {"Accept": _JSON, "Content-Type": content_type, "User-Agent": FIELD_MANAGER}
        token = await configuration.get_api_key_with_prefix("BearerToken")  # read again once it was renewed on disk
        if token:
            headers["Authorization"] = token
        async with self._session().request(
            method,
            URL(f"{configuration.host}{path}", encoded=True),
            data=None if body is None else msgspec.json.encode(body),
            headers=headers,
            timeout=_TIMEOUT,
            proxy=configuration.proxy,
            proxy_headers=configuration.proxy_headers,
            server_hostname=configuration.tls_server_name or None,
        ) as response:
            self._note_date(response.headers.get("Date"))
            return Answer(response.status, response.reason or "", await response.read())

    def now(self) -> datetime:
        """By the API server's clock, to a second or two: times of objects are its own, and this machine's clock may
        differ."""
        return datetime.fromtimestamp(time.time() + self._ahead_seconds, UTC)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def _note_date(self, date: str | None) -> None:
        """`date`: of an answer, in whole seconds."""
        with suppress(ValueError, TypeError):
            ahead = parsedate_to_datetime(date or "").timestamp() - time.time()
            self._ahead_seconds = ahead if abs(ahead) > _SAME_SECONDS else 0.0

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            connector = aiohttp.TCPConnector(limit=self._configuration.connection_pool_maxsize, ssl=self._ssl_context)
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
