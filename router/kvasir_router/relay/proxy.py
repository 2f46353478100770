"""Forwards one attempt to one endpoint and relays its answer byte for byte.

Nothing reaches the client before the first byte of the answer's body, so every failure until then can be retried
elsewhere; a stream whose engine keeps a journal can be continued elsewhere even later, and its client gets the bytes of
one unbroken stream. Leaving early (client gone, time-out) closes the upstream connection, which makes the engine abort.
"""

from collections.abc import Callable
from email.utils import mktime_tz, parsedate_tz

from kvasir_router.errors import (
    StreamMovedError,
    UpstreamBrokenError,
    UpstreamBusyError,
    UpstreamDoubtfulError,
    UpstreamRedirectedError,
    UpstreamRefusedError,
    UpstreamUnavailableError,
)
from kvasir_router.relay.exchange import Exchange
from kvasir_router.relay.headers import RawHeaders, end_to_end, lines, value_of
from kvasir_router.relay.journal import JOURNAL_BOUNDS, JOURNAL_HEADER, RESUMABLE_HEADER, Journal, JournalBounds
from kvasir_router.relay.kv_transfer import decode_body
from kvasir_router.relay.upstream_answer import UpstreamAnswer, ignore
from kvasir_router.relay.upstream_pool import Sending, UpstreamPool

BUSY_STATUS = 429
DOUBTFUL_STATUS = frozenset({401, 403, 404, 405})
_RETRYABLE_STATUS = frozenset({BUSY_STATUS, 502, 503, 504})
_BUSY_SECONDS = (1.0, 30.0)
"""What is believed of a Retry-After: the least, which holds without one too, and the most."""
ROUTER_SECRET_HEADER = "x-kvasir-router-secret"
"""Proves to an engine that tenant and journal come from its own router."""
TENANT_HEADER = "x-kvasir-tenant"
_REQUEST_ID = b"x-request-id"
_TENANT = TENANT_HEADER.encode()
_ROUTER_SECRET = ROUTER_SECRET_HEADER.encode()
_RESUMABLE = RESUMABLE_HEADER.encode()
_JOURNAL_AT = JOURNAL_HEADER.encode()
_OWN = frozenset({_REQUEST_ID, _TENANT, _ROUTER_SECRET, _RESUMABLE, _JOURNAL_AT})
_NOT_FORWARDED = _OWN | {b"host", b"content-length", b"expect"}
_OF_WHOLE_ANSWERS = frozenset({b"accept-encoding"})
_WITHOUT_KEY = _NOT_FORWARDED | {b"authorization", b"x-api-key"}


def forwarded_headers(
    headers: RawHeaders,
    request_id: str,
    tenant: str | None,
    router_secret: str | None,
    *,
    is_stream: bool,
    is_resumable: bool,
) -> bytes:
    """The client's headers as lines, traceparent among them, hop-by-hop ones not. Streams are to come uncompressed,
    since lines are added to them here, and with a journal where they can be continued.

    Where the router checked a key, it names the key's tenant to the engine instead of passing the key on. A client
    cannot say any of this itself.
    """
    not_forwarded = _NOT_FORWARDED if tenant is None else _WITHOUT_KEY
    passed = end_to_end(headers, not_forwarded | _OF_WHOLE_ANSWERS if is_stream else not_forwarded)
    passed.append((_REQUEST_ID, request_id.encode("latin-1")))
    if tenant is not None:
        passed.append((_TENANT, tenant.encode()))
    if router_secret is not None:
        passed.append((_ROUTER_SECRET, router_secret.encode()))
    if is_resumable:
        passed.append((_RESUMABLE, b"1"))
    return lines(passed)


class Proxy:
    def __init__(self, pool: UpstreamPool, journal_bounds: JournalBounds = JOURNAL_BOUNDS) -> None:
        self._pool = pool
        self._journal_bounds = journal_bounds

    def send(
        self,
        exchange: Exchange,
        headers: bytes,
        endpoint_url: str,
        *,
        journal: Journal | None = None,
        kv_transfer_params: bytes | None = None,
    ) -> Sending:
        """An attempt's request. `forward` is to follow, or `resume` with the same journal.

        `journal` is what the client has of its stream, for the endpoint to go on with. `kv_transfer_params`: who
        prefills, where it is not this endpoint. Raises UpstreamError.
        """
        body = exchange.body.content
        content = (body,) if kv_transfer_params is None else decode_body(body, kv_transfer_params)
        if journal is not None:
            journal.drop_unfinished_block()
            if journal.num_bytes:
                headers += lines([(_JOURNAL_AT, b"%d" % sum(map(len, content)))])
            content = (*content, journal.lines)
        return self._pool.send(endpoint_url, exchange.path.encode("latin-1"), headers, content)

    async def forward(
        self, exchange: Exchange, sending: Sending, *, relay_unavailable: bool, on_first_byte: Callable[[int], None]
    ) -> int:
        """Returns the answer's status once its body has been relayed; `Exchange.end` is the caller's.

        The body is dropped as soon as no other attempt can follow. `relay_unavailable`: pass on what another endpoint
        might answer better (429, 502, 503, 504, and 401, 403, 404, 405), because there is nowhere else to go.
        `on_first_byte` is told the status when the client has been written the first of the body. Raises UpstreamError,
        RequestTimeoutError, StreamMovedError.
        """
        answer = await self._pool.answer(sending)
        try:
            _check_whether_it_is_relayed(answer, relay_unavailable=relay_unavailable)
            exchange.start(answer.status, answer.headers)
            if value_of(answer.headers, _RESUMABLE) is None:
                exchange.body.drop()
                await exchange.relay(answer, on_first_byte=on_first_byte)
            else:
                exchange.journal = Journal(exchange.body.budget, self._journal_bounds)
                await _relay_events(answer, exchange, exchange.journal, on_first_byte)
            return answer.status
        finally:
            answer.close()

    async def resume(
        self, exchange: Exchange, sending: Sending, journal: Journal, *, on_first_byte: Callable[[int], None]
    ) -> int:
        """Has the endpoint continue a stream from what its client has, and relays the rest. Raises as `forward`.

        `on_first_byte` is told when there is something to relay, and the journal is still that of other endpoints.
        """
        answer = await self._pool.answer(sending)
        try:
            _check_whether_it_continues(answer)
            on_first_byte(answer.status)
            await _relay_events(answer, exchange, journal)
            return answer.status
        finally:
            answer.close()


def _check_whether_it_is_relayed(answer: UpstreamAnswer, *, relay_unavailable: bool) -> None:
    reason = str(answer.status)
    if answer.status in _RETRYABLE_STATUS and not relay_unavailable:
        raise unavailable(answer)
    if answer.status in DOUBTFUL_STATUS and not relay_unavailable:
        raise UpstreamDoubtfulError(f"{answer.url} answered {reason}", reason)
    if 300 <= answer.status < 400:
        raise UpstreamRedirectedError(f"{answer.url} answered {reason}, and no redirect is relayed", reason)


def _check_whether_it_continues(answer: UpstreamAnswer) -> None:
    reason = str(answer.status)
    if answer.status >= 500 or answer.status == BUSY_STATUS:
        raise unavailable(answer)
    if answer.status != 200 or value_of(answer.headers, _RESUMABLE) is None:
        raise UpstreamRefusedError(f"{answer.url} does not continue the stream: {reason}", reason)


def unavailable(answer: UpstreamAnswer) -> UpstreamUnavailableError:
    message, reason, retry_after = f"{answer.url} answered {answer.status}", str(answer.status), _retry_after(answer)
    if answer.status == BUSY_STATUS or (answer.status == 503 and retry_after is not None):
        least, most = _BUSY_SECONDS
        return UpstreamBusyError(message, reason, min(max(retry_after or 0.0, least), most))
    return UpstreamUnavailableError(message, reason)


def _retry_after(answer: UpstreamAnswer) -> float | None:
    """Seconds: as written, or from the answer's own date until the one that is written; 0 where it says neither."""
    value = value_of(answer.headers, b"retry-after")
    if value is None:
        return None
    if value.isdigit() and len(value) < 100:
        return float(value)
    until, now = _time_of(value), _time_of(value_of(answer.headers, b"date") or b"")
    return 0.0 if until is None or now is None else until - now


def _time_of(date: bytes) -> float | None:
    """Seconds since the epoch of a date of HTTP; None: it is none."""
    parsed = parsedate_tz(date.decode("latin-1"))
    try:
        return None if parsed is None else float(mktime_tz(parsed))
    except (ValueError, OverflowError):
        return None


async def _relay_events(
    answer: UpstreamAnswer, exchange: Exchange, journal: Journal, on_first_byte: Callable[[int], None] = ignore
) -> None:
    """Whole events only, whose lines are kept once they are on their way."""
    num_bytes_before = journal.num_bytes

    def write(chunk: bytes) -> None:
        events, lines = journal.split(chunk)
        if events:
            exchange.write(events)
        journal.keep(lines)
        if journal.is_given_up:
            exchange.body.drop()

    await exchange.relay(answer, write, on_first_byte)
    if not exchange.has_whole_stream:
        if journal.is_moved and journal.num_bytes > num_bytes_before:
            raise StreamMovedError(f"{answer.url} hands its stream over")
        raise UpstreamBrokenError(
            f"the engine {answer.url} ended its stream in the middle; what came so far is incomplete", "broken"
        )
