"""The main path of every forwarded request: handle -> parse -> admit -> pick -> forward, and again where that fails.

It is plain ASGI: request models and response classes would cost more than the routing itself.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from kvasir_router import proxy, request
from kvasir_router.admission import Admission
from kvasir_router.api_keys import ApiKeys
from kvasir_router.body import Body, BodyBudget
from kvasir_router.disconnect import cancelled_on_disconnect
from kvasir_router.endpoints.endpoint import EndpointView
from kvasir_router.errors import (
    BadGatewayError,
    ClientDisconnectedError,
    QueueFullError,
    QueueWaitExceededError,
    RequestError,
    RequestTimeoutError,
    RouterStoppingError,
    StreamInterruptedError,
    UpstreamConnectError,
    UpstreamError,
)
from kvasir_router.exchange import Exchange
from kvasir_router.fleet import Fleet, Ticket
from kvasir_router.hang import interrupted_when_hung
from kvasir_router.health import Prober
from kvasir_router.job import Job
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
    router_secret: str | None  # None: engines are not told who asks
    prompt_settings: PromptSettings
    bodies: BodyBudget
    admission: Admission
    picker: Picker
    fleet: Fleet
    prober: Prober
    proxy: Proxy
    metrics: Metrics


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
        body = Body(self._parts.bodies)
        job: Job | None = None
        status = 500
        self._parts.metrics.in_flight.inc()
        try:
            job = await self._receive(scope, receive, exchange, body)
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
            body.drop()
            self._count(exchange, job, status)

    async def _receive(self, scope: Scope, receive: Receive, exchange: Exchange, body: Body) -> Job:
        """The request as far as it concerns routing. Raises RequestError for whoever may not ask or asks nonsense."""
        headers, api_keys = scope["headers"], self._parts.api_keys
        tenant = None if api_keys is None else api_keys.tenant_of(headers)
        await body.read(receive, self._limits.max_body_bytes, exchange.announced_bytes)
        body_received = time.perf_counter()
        inference = request.parse(exchange.path, body.content, self._parts.prompt_settings, self._parts.models.resolve)
        self._parts.models.check(inference.model)
        body.content = request.engine_body(inference, body.content)
        forwarded = proxy.forwarded_headers(
            headers, exchange.request_id, tenant, self._parts.router_secret, is_stream=inference.is_stream
        )
        return Job(exchange, inference, body, forwarded, body_received, self._limits.num_retries)

    async def _answer(self, job: Job) -> int:
        """Tries endpoints until one gives the answer, or the rest of a stream that others have begun."""
        while True:
            endpoint = await self._choose(job)
            job.tried.add(endpoint.url)
            job.revision = endpoint.revision
            try:
                return await self._forward(job, endpoint)
            except UpstreamError as error:
                if job.exchange.has_whole_stream:
                    return 200
                self._decide_on_retry(job, endpoint, error)

    async def _choose(self, job: Job) -> EndpointView:
        """Admission and pick; nothing is awaited between them and the dispatch, so the place is still free."""
        parts, model, has_begun = self._parts, job.request.model, job.exchange.has_started
        while True:
            try:
                waited_seconds = await parts.admission.admit(
                    lambda: parts.fleet.can_place(model), job.waited_seconds, has_begun=has_begun
                )
            except (QueueFullError, QueueWaitExceededError) as error:
                if not has_begun:
                    raise
                raise StreamInterruptedError(f"the engine stopped in the middle of its answer, and {error}") from error
            job.count_wait(waited_seconds)
            endpoint = parts.picker.pick(job.request, parts.fleet.snapshot(job.request, job.tried))
            if endpoint is not None:
                return endpoint

    async def _forward(self, job: Job, endpoint: EndpointView) -> int:
        ticket = self._parts.fleet.dispatch(job.request, endpoint)
        self._parts.metrics.count_dispatch(job.request, endpoint, self._own_seconds(job))
        release = self._release_when_expected(job.request, ticket)
        try:
            async with (
                asyncio.timeout(self._limits.request_timeout_seconds),
                interrupted_when_hung(ticket, lambda: job.exchange.can_go_elsewhere),
            ):
                return await self._attempt(job, endpoint, ticket)
        except TimeoutError as error:
            seconds = self._limits.request_timeout_seconds
            raise RequestTimeoutError(f"{endpoint.url} did not finish the answer within {seconds:g} s") from error
        finally:
            if release is not None:
                release.cancel()
            ticket.finish()

    async def _attempt(self, job: Job, endpoint: EndpointView, ticket: Ticket) -> int:
        """From the beginning, or from what the client has."""
        exchange, journal = job.exchange, job.exchange.journal
        if exchange.has_started and journal is not None:
            return await self._parts.proxy.resume(
                job.body,
                job.headers,
                endpoint.url,
                exchange,
                journal,
                on_first_byte=lambda _: self._note_resumption(job, ticket),
            )
        has_other = job.can_fail_again and self._parts.fleet.can_place(job.request.model, job.tried)
        return await self._parts.proxy.forward(
            job.body,
            job.headers,
            endpoint.url,
            exchange,
            relay_unavailable=not has_other,
            on_first_byte=lambda status: self._note_first_byte(job, ticket, status),
        )

    def _decide_on_retry(self, job: Job, endpoint: EndpointView, error: UpstreamError) -> None:
        """Raises RequestError when that was the last attempt."""
        can_retry = job.count_failure(endpoint.url, error)
        self._note_failure(job, endpoint, error, is_last=not can_retry)
        if can_retry:
            return
        if job.exchange.has_started:
            raise StreamInterruptedError(str(error)) from error
        raise BadGatewayError(f"no engine answered; the last attempt: {error}") from error

    def _own_seconds(self, job: Job) -> float | None:
        """What the router itself has added so far: neither the client's sending nor the queue; None once it answers."""
        if job.exchange.has_started:
            return None
        return max(time.perf_counter() - job.body_received - job.queue_wait_seconds, 0.0)

    def _release_when_expected(self, inference: InferenceRequest, ticket: Ticket) -> asyncio.TimerHandle | None:
        """Without a stream the first byte comes long after the prefill: assume that took what was expected."""
        if inference.is_stream:
            return None
        return asyncio.get_running_loop().call_later(ticket.expected_prefill_seconds, ticket.release_prefill)

    def _note_first_byte(self, job: Job, ticket: Ticket, status: int) -> None:
        if job.request.is_stream and status == 200:
            now = time.perf_counter()
            ticket.first_token(now)
            self._parts.metrics.time_to_first_byte(job.request.model or "").observe(now - job.exchange.arrived)

    def _note_resumption(self, job: Job, ticket: Ticket) -> None:
        ticket.release_prefill()  # how long it took says little: the tokens made so far were computed as well
        self._parts.metrics.streams_resumed(job.lost_reason).inc()
        logger.info(
            "request_id=%s endpoint=%s goes on with a stream lost elsewhere (%s)",
            job.exchange.request_id,
            ticket.url,
            job.lost_reason,
        )

    def _note_failure(self, job: Job, endpoint: EndpointView, error: UpstreamError, *, is_last: bool) -> None:
        logger.warning("request_id=%s endpoint=%s %s", job.exchange.request_id, endpoint.url, error)
        self._parts.metrics.upstream_errors(error.reason).inc()
        self._parts.metrics.revision_errors(endpoint.revision, error.reason).inc()
        if not is_last:
            self._parts.metrics.retries(error.reason).inc()
        if isinstance(error, UpstreamConnectError):
            self._parts.prober.eject(endpoint.url)

    def _count(self, exchange: Exchange, job: Job | None, status: int) -> None:
        """A model that is not served here is the client's invention and must not make a series: its label is empty."""
        asked = job.request.model if job is not None else None
        model = asked if asked is not None and self._parts.models.is_known(asked) else ""
        queue_wait_seconds = job.queue_wait_seconds if job is not None else 0.0
        if job is not None and job.revision is not None:
            self._parts.metrics.revision_requests(job.revision, str(status)).inc()
        self._parts.metrics.count_end(model, status, time.perf_counter() - exchange.arrived, queue_wait_seconds)
