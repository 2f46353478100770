"""Forwards one attempt to one endpoint and relays its answer byte for byte.

Nothing reaches the client before the first byte of the answer's body, so every failure until then can be retried
elsewhere; a stream whose engine keeps a journal can be continued elsewhere even later, and its client gets the bytes of
one unbroken stream. Leaving early (client gone, time-out) closes the upstream connection, which makes the engine abort.
"""

import io
from collections.abc import Callable

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from kvasir_router.body import Body
from kvasir_router.errors import (
    UpstreamBrokenError,
    UpstreamConnectError,
    UpstreamLostError,
    UpstreamRedirectedError,
    UpstreamRefusedError,
    UpstreamUnavailableError,
)
from kvasir_router.exchange import HOP_BY_HOP, Exchange, RawHeaders
from kvasir_router.journal import JOURNAL_HEADER, RESUMABLE_HEADER, Journal

_RETRYABLE_STATUS = frozenset({502, 503, 504})
ROUTER_SECRET_HEADER = "x-kvasir-router-secret"
"""Proves to an engine that tenant and journal come from its own router."""
_TENANT_HEADER = "x-kvasir-tenant"
_OWN_HEADERS = frozenset(
    name.encode() for name in ("x-request-id", _TENANT_HEADER, ROUTER_SECRET_HEADER, RESUMABLE_HEADER, JOURNAL_HEADER)
)
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect"} | _OWN_HEADERS
_WITHOUT_KEY = _NOT_FORWARDED | {b"authorization"}
# aiohttp warns about larger bodies given as bytes: it would write them in one piece.
_MAX_BYTES_BODY = 2**20
# Just under the 5 s after which uvicorn, which serves the engines, closes an idle connection.
_KEEPALIVE_SECONDS = 4.0


def open_session(connect_timeout_seconds: float) -> aiohttp.ClientSession:
    """A client that adds nothing of its own to a request and decodes nothing of an answer. The caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, ttl_dns_cache=10),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


def forwarded_headers(
    raw_headers: RawHeaders, request_id: str, tenant: str | None, router_secret: str | None, *, is_stream: bool
) -> CIMultiDict[str]:
    """The client's headers, traceparent among them, without hop-by-hop ones; of streams a journal is asked for.

    Where the router checked a key, it names the key's tenant to the engine instead of passing the key on. A client
    cannot say any of this itself.
    """
    dropped = _NOT_FORWARDED if tenant is None else _WITHOUT_KEY
    headers = CIMultiDict(
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in raw_headers if name not in dropped
    )
    headers["x-request-id"] = request_id
    if tenant is not None:
        headers[_TENANT_HEADER] = tenant
    if router_secret is not None:
        headers[ROUTER_SECRET_HEADER] = router_secret
    if is_stream:
        headers[RESUMABLE_HEADER] = "1"
    return headers


class Proxy:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def forward(
        self,
        body: Body,
        headers: CIMultiDict[str],
        endpoint_url: str,
        exchange: Exchange,
        *,
        relay_unavailable: bool,
        on_first_byte: Callable[[int], None],
    ) -> int:
        """Returns the answer's status once its body has been relayed; `Exchange.end` is the caller's.

        The body is dropped as soon as no other attempt can follow.
        `relay_unavailable`: pass a 502, 503 or 504 on, because there is nowhere else to go. Raises UpstreamError.
        """
        response = await self._open(exchange.path, body.content, headers, endpoint_url)
        try:
            if response.status in _RETRYABLE_STATUS and not relay_unavailable:
                raise UpstreamUnavailableError(f"{endpoint_url} answered {response.status}", str(response.status))
            if 300 <= response.status < 400:
                reason = str(response.status)
                raise UpstreamRedirectedError(f"{endpoint_url} answered {reason}, and no redirect is relayed", reason)
            chunk = await self._first_chunk(response, endpoint_url)
            on_first_byte(response.status)
            await exchange.start(response.status, response.raw_headers)
            if RESUMABLE_HEADER not in response.headers:
                body.drop()
                await self._relay(response, chunk, exchange, endpoint_url)
            else:
                exchange.journal = Journal()
                await self._relay_events(response, chunk, exchange, exchange.journal, body, endpoint_url)
            return response.status
        finally:
            response.close()  # gives a connection that has been read to its end back, closes any other

    async def resume(
        self,
        body: Body,
        headers: CIMultiDict[str],
        endpoint_url: str,
        exchange: Exchange,
        journal: Journal,
        *,
        on_first_byte: Callable[[int], None],
    ) -> int:
        """Has the endpoint continue a stream from what its client has, and relays the rest. Raises UpstreamError."""
        journal.drop_unfinished_block()
        if journal.num_bytes:
            headers = headers.copy()
            headers[JOURNAL_HEADER] = str(len(body.content))
        response = await self._open(exchange.path, body.content + journal.lines, headers, endpoint_url)
        try:
            if response.status >= 500:
                raise UpstreamUnavailableError(f"{endpoint_url} answered {response.status}", str(response.status))
            if response.status != 200 or RESUMABLE_HEADER not in response.headers:
                reason = str(response.status)
                raise UpstreamRefusedError(f"{endpoint_url} does not continue the stream: {reason}", reason)
            chunk = await self._first_chunk(response, endpoint_url)
            on_first_byte(response.status)
            await self._relay_events(response, chunk, exchange, journal, body, endpoint_url)
            return response.status
        finally:
            response.close()

    async def _open(
        self, path: str, content: bytes, headers: CIMultiDict[str], endpoint_url: str
    ) -> aiohttp.ClientResponse:
        data = content if len(content) <= _MAX_BYTES_BODY else io.BytesIO(content)
        url = URL(endpoint_url + path, encoded=True)
        try:
            return await self._session.post(url, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamConnectError(f"cannot connect to {endpoint_url}: {error}", "connect") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamLostError(f"{endpoint_url} closed the connection: {error!r}", "lost") from error

    async def _first_chunk(self, response: aiohttp.ClientResponse, endpoint_url: str) -> bytes:
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamLostError(f"{endpoint_url} closed the connection: {error!r}", "lost") from error

    async def _relay(
        self, response: aiohttp.ClientResponse, chunk: bytes, exchange: Exchange, endpoint_url: str
    ) -> None:
        """Whatever has arrived goes out as one piece; a slow client stops the reading, and so the engine's writing."""
        send, readany = exchange.send, response.content.readany
        try:
            while chunk:
                exchange.last_chunk = chunk
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(endpoint_url) from error

    async def _relay_events(
        self,
        response: aiohttp.ClientResponse,
        chunk: bytes,
        exchange: Exchange,
        journal: Journal,
        body: Body,
        endpoint_url: str,
    ) -> None:
        """The same for a stream with a journal: whole events, whose lines are kept once they are on their way.

        A send that is interrupted while it waits for a slow client has written nothing.
        """
        send, readany = exchange.send, response.content.readany
        try:
            while chunk:
                events, lines = journal.split(chunk)
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    exchange.last_chunk = events
                journal.keep(lines)
                if journal.is_too_long:
                    body.drop()
                chunk = await readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(endpoint_url) from error
        if not exchange.has_whole_stream:
            raise _broken(endpoint_url)


def _broken(endpoint_url: str) -> UpstreamBrokenError:
    return UpstreamBrokenError(
        f"the engine {endpoint_url} stopped in the middle of its answer; what came so far is incomplete", "broken"
    )
