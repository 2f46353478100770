"""Asks Prometheus, or whatever answers as it does, over HTTP; the only place that knows its API.

The token's file is read at every question: what mounts it renews it.
"""

import asyncio
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvasir_operator.errors import PrometheusError, described

TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class PrometheusAccess:
    """`url`: up to what comes before `/api/v1`. `ca_file` None: the system's certificates."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None
    is_verified: bool = True


@dataclass(frozen=True)
class Value:
    labels: Mapping[str, str]
    number: float


class Prometheus:
    """Made within an event loop; close it at the end."""

    def __init__(self, access: PrometheusAccess, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Raises PrometheusError for certificates that cannot be read."""
        self._access = access
        self._url = f"{access.url.rstrip('/')}/api/v1/query"
        connector = aiohttp.TCPConnector(ssl=_tls(access), limit=16)
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        await self._session.close()

    async def query_all(self, queries: Mapping[str, str]) -> dict[str, list[Value]]:
        """The answers by the questions' names. Raises PrometheusError when one of them has none."""
        answers = await asyncio.gather(*(self.query(query) for query in queries.values()))
        return dict(zip(queries, answers, strict=True))

    async def query(self, query: str) -> list[Value]:
        """An instant vector; values that are no numbers, as of an empty histogram, are left out."""
        try:
            async with self._session.post(self._url, data={"query": query}, headers=self._headers()) as answer:
                body = await answer.json(content_type=None)
                return _values(body, answer.status, query)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise PrometheusError(
                f"{self._url} did not answer: {described(error)}; is prometheus.url right?"
            ) from error

    def _headers(self) -> dict[str, str]:
        file = self._access.token_file
        return {} if file is None else {"Authorization": f"Bearer {file.read_text().strip()}"}


def _tls(access: PrometheusAccess) -> ssl.SSLContext | bool:
    if not access.is_verified:
        return False
    if access.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=access.ca_file)
    except OSError as error:
        raise PrometheusError(f"{access.ca_file} holds no certificates that could be read: {error}") from error


def _values(body: Any, status: int, query: str) -> list[Value]:
    try:
        if body["status"] != "success":
            raise PrometheusError(f"Prometheus refused {query!r}: HTTP {status}: {body.get('error')}")
        values = [Value(each["metric"], float(each["value"][1])) for each in body["data"]["result"]]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise PrometheusError(f"Prometheus answered HTTP {status} and no instant vector to {query!r}") from error
    return [value for value in values if math.isfinite(value.number)]
