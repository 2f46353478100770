"""Asks Prometheus, or whatever answers as it does, over HTTP; the only place that knows its API.

Files with credentials and certificates are read at every question: what mounts them renews them.
"""

import asyncio
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from kvasir_operator.errors import PrometheusError, described
from kvasir_operator.kube.configuration import proxy_of
from kvasir_operator.server_clock import ServerClock

TIMEOUT_SECONDS = 10.0
Name = TypeVar("Name")


@dataclass(frozen=True)
class PrometheusAccess:
    """`url`: up to what comes before `/api/v1`. `ca_file` None: the system's certificates."""

    url: str
    token_file: Path | None = None
    basic_auth_folder: Path | None = None
    """Of the files `username` and `password`, as a Secret of the type kubernetes.io/basic-auth mounts them."""
    headers_folder: Path | None = None
    """Of a file a header, with its name and value: a tenant's (X-Scope-OrgID), a gateway's key."""
    ca_file: Path | None = None
    is_verified: bool = True


@dataclass(frozen=True)
class Value:
    labels: Mapping[str, str]
    number: float


class Prometheus:
    """Made within an event loop; close it at the end."""

    def __init__(self, access: PrometheusAccess, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.clock = ServerClock()
        """By which it says when it scraped."""
        self._access = access
        self._trusted: tuple[int, ssl.SSLContext] | None = None
        self._url = f"{access.url.rstrip('/')}/api/v1/query"
        connector = aiohttp.TCPConnector(limit=16)
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, proxy=proxy_of(access.url))

    async def close(self) -> None:
        await self._session.close()

    async def query_all(self, queries: Mapping[Name, str]) -> dict[Name, list[Value]]:
        """The answers by the questions' names. Raises PrometheusError when one of them has none."""
        answers = await asyncio.gather(*(self.query(query) for query in queries.values()))
        return dict(zip(queries, answers, strict=True))

    async def query(self, query: str) -> list[Value]:
        """An instant vector; values that are no numbers, as of an empty histogram, are left out, and so is a histogram
        that is a value itself."""
        try:
            headers, tls = self._headers(), self._tls()
            async with self._session.post(self._url, data={"query": query}, headers=headers, ssl=tls) as answer:
                self.clock.note(answer.headers.get("Date"))
                body = await answer.json(content_type=None)
                return _values(body, answer.status, query)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise PrometheusError(
                f"{self._url} did not answer: {described(error)}; is prometheus.url right?"
            ) from error

    def _tls(self) -> ssl.SSLContext | bool:
        """One context for as long as the file of certificates is the same, so that connections are used again."""
        file = self._access.ca_file
        if file is None or not self._access.is_verified:
            return self._access.is_verified
        try:
            changed_at = file.stat().st_mtime_ns
            if self._trusted is None or self._trusted[0] != changed_at:
                self._trusted = changed_at, ssl.create_default_context(cafile=file)
            return self._trusted[1]
        except OSError as error:
            raise PrometheusError(f"{file} holds no certificates that could be read: {error}") from error

    def _headers(self) -> dict[str, str]:
        """Raises OSError, or ValueError for what no header can hold."""
        access, headers = self._access, dict[str, str]()
        if access.headers_folder is not None:  # of which the kubelet makes links, beside folders that begin with a dot
            headers = {file.name: _text(file) for file in access.headers_folder.iterdir() if file.is_file()}
        if access.token_file is not None:
            headers["Authorization"] = f"Bearer {_text(access.token_file)}"
        if access.basic_auth_folder is not None:
            user, password = (_text(access.basic_auth_folder / name) for name in ("username", "password"))
            headers["Authorization"] = aiohttp.BasicAuth(user, password, "utf-8").encode()
        return headers


def _text(file: Path) -> str:
    return file.read_text().strip()


def _values(body: Any, status: int, query: str) -> list[Value]:
    try:
        if body["status"] != "success":
            raise PrometheusError(f"Prometheus refused {query!r}: HTTP {status}: {body.get('error')}")
        found = [each for each in body["data"]["result"] if "histogram" not in each]
        values = [Value(dict(each["metric"]), float(each["value"][1])) for each in found]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise PrometheusError(f"Prometheus answered HTTP {status} and no instant vector to {query!r}") from error
    return [value for value in values if math.isfinite(value.number)]
