"""The main path of every forwarded request: handle -> parse -> admit -> pick -> forward.

It is plain ASGI: request models and response classes would cost more than the routing itself.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send

from kvasir_router import proxy, request
from kvasir_router.admission import Admission
from kvasir_router.api_keys import ApiKeys
from kvasir_router.disconnect import cancelled_on_disconnect
from kvasir_router.endpoints.endpoint import EndpointView
from kvasir_router.errors import (
    BadGatewayError,
    ClientDisconnectedError,
    RequestError,
    RequestTimeoutError,
    RouterStoppingError,
    UpstreamConnectError,
    UpstreamError,
)
from kvasir_router.exchange import Exchange, read_body
from kvasir_router.fleet import Fleet, Ticket
from kvasir_router.health import Prober
from kvasir_router.metrics import Metrics
from kvasir_router.models import ModelCatalog
from kvasir_router.picker import Picker
from kvasir_router.proxy import Proxy
from kvasir_router.request import InferenceRequest, PromptSettings

logger = logging.getLogger(__name__)

# What nginx made customary for "client closed request"; only metrics ever show it.
_CLIENT_CLOSED_STATUS = 499


@dataclass(frozen=True)
class Limits:
    max_body_bytes: int
    request_timeout_seconds: float
    num_retries: int


@dataclass(frozen=True)
class Parts:
    """What the handler works with, built once in `server`."""

    models: ModelCatalog
    api_keys: ApiKeys | None  # None: open to everybody
    prompt_settings: PromptSettings
    admission: Admission
    picker: Picker
    fleet: Fleet
    prober: Prober
    proxy: Proxy
    metrics: Metrics


@dataclass(slots=True)
class _Job:
    """One request on its way through the router."""

    exchange: Exchange
    request: InferenceRequest
    headers: CIMultiDict[str]  # to be forwarded
    body_received: float
    queue_wait_seconds: float = 0.0


class Handler:
    """An ASGI application for every route that is forwarded."""

    def __init__(self, parts: Parts, limits: Limits) -> None:
        self._parts = parts
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.handle(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every request gets an answer here, and is counted once."""
        exchange = Exchange(scope, send, time.perf_counter())
        job: _Job | None = None
        status = 500
        self._parts.metrics.in_flight.inc()
        try:
            job = await self._receive(scope, receive, exchange)
            async with cancelled_on_disconnect(receive):
                status = await self._answer(job)
            await exchange.end()
        except ClientDisconnectedError:
            status = _CLIENT_CLOSED_STATUS
        except RequestError as error:
            status = error.status
            logger.info("request_id=%s status=%d %s", exchange.request_id, status, error)
            await exchange.fail(error)
        except asyncio.CancelledError:
            # The server's time to drain is over; the task ends here, so swallowing the cancellation loses nothing.
            status = RouterStoppingError.status
            await exchange.fail(
                RouterStoppingError("the router is stopping and cannot wait for this answer any longer")
            )
        except Exception:
            logger.exception("request_id=%s failed", exchange.request_id)
            await exchange.fail(RequestError("the router failed to handle this request; its log says why"))
        finally:
            self._count(exchange, job, status)

    async def _receive(self, scope: Scope, receive: Receive, exchange: Exchange) -> _Job:
        """The request as far as it concerns routing. Raises RequestError for whoever may not ask or asks nonsense."""
        headers, api_keys = scope["headers"], self._parts.api_keys
        tenant = None if api_keys is None else api_keys.tenant_of(headers)
        body = await read_body(scope, receive, self._limits.max_body_bytes)
        body_received = time.perf_counter()
        inference = request.parse(exchange.path, body, self._parts.prompt_settings)
        self._parts.models.check(inference.model)
        forwarded = proxy.forwarded_headers(headers, exchange.request_id, tenant)
        return _Job(exchange, inference, forwarded, body_received)

    async def _answer(self, job: _Job) -> int:
        """Tries endpoints until one gives a first byte; from then on there is no way back."""
        tried: set[str] = set()
        for retries_left in range(self._limits.num_retries, -1, -1):
            endpoint = await self._choose(job, tried)
            tried.add(endpoint.url)
            try:
                can_go_elsewhere = retries_left > 0 and self._has_other(job, tried)
                return await self._forward(job, endpoint, can_go_elsewhere=can_go_elsewhere)
            except UpstreamError as error:
                self._note_failure(job, endpoint, error, is_last=retries_left == 0)
                failure = error
        raise BadGatewayError(f"no engine answered; the last attempt: {failure}") from failure

    async def _choose(self, job: _Job, tried: set[str]) -> EndpointView:
        """Admission and pick; nothing is awaited between them and the dispatch, so the place is still free."""
        parts, model = self._parts, job.request.model
        while True:
            waited = await parts.admission.admit(lambda: parts.fleet.can_place(model), job.queue_wait_seconds)
            job.queue_wait_seconds += waited
            endpoint = parts.picker.pick(job.request, parts.fleet.snapshot(job.request, tried))
            if endpoint is not None:
                return endpoint

    async def _forward(self, job: _Job, endpoint: EndpointView, *, can_go_elsewhere: bool) -> int:
        ticket = self._parts.fleet.dispatch(job.request, endpoint)
        self._parts.metrics.count_dispatch(job.request, endpoint, self._own_seconds(job))
        release = self._release_when_expected(job.request, ticket)
        try:
            async with asyncio.timeout(self._limits.request_timeout_seconds):
                return await self._parts.proxy.forward(
                    job.request,
                    job.headers,
                    endpoint.url,
                    job.exchange,
                    relay_unavailable=not can_go_elsewhere,
                    on_first_byte=lambda status: self._note_first_byte(job, ticket, status),
                )
        except TimeoutError as error:
            seconds = self._limits.request_timeout_seconds
            raise RequestTimeoutError(f"{endpoint.url} did not finish the answer within {seconds:g} s") from error
        finally:
            if release is not None:
                release.cancel()
            ticket.finish()

    def _has_other(self, job: _Job, tried: set[str]) -> bool:
        return self._parts.fleet.can_place(job.request.model, tried)

    def _own_seconds(self, job: _Job) -> float:
        """What the router itself has added so far: neither the client's sending nor the queue."""
        return max(time.perf_counter() - job.body_received - job.queue_wait_seconds, 0.0)

    def _release_when_expected(self, inference: InferenceRequest, ticket: Ticket) -> asyncio.TimerHandle | None:
        """Without a stream the first byte comes long after the prefill: assume that took what was expected."""
        if inference.is_stream:
            return None
        return asyncio.get_running_loop().call_later(ticket.expected_prefill_seconds, ticket.release_prefill)

    def _note_first_byte(self, job: _Job, ticket: Ticket, status: int) -> None:
        if job.request.is_stream and status == 200:
            now = time.perf_counter()
            ticket.first_token(now)
            self._parts.metrics.time_to_first_byte(job.request.model or "").observe(now - job.exchange.arrived)

    def _note_failure(self, job: _Job, endpoint: EndpointView, error: UpstreamError, *, is_last: bool) -> None:
        logger.warning("request_id=%s endpoint=%s %s", job.exchange.request_id, endpoint.url, error)
        self._parts.metrics.upstream_errors(error.reason).inc()
        if not is_last:
            self._parts.metrics.retries(error.reason).inc()
        if isinstance(error, UpstreamConnectError):
            self._parts.prober.eject(endpoint.url)

    def _count(self, exchange: Exchange, job: _Job | None, status: int) -> None:
        """A model that is not served here is the client's invention and must not make a series: its label is empty."""
        asked = job.request.model if job is not None else None
        model = asked if asked is not None and self._parts.models.is_known(asked) else ""
        queue_wait_seconds = job.queue_wait_seconds if job is not None else 0.0
        self._parts.metrics.count_end(model, status, time.perf_counter() - exchange.arrived, queue_wait_seconds)
