"""The main path of every forwarded request: handle -> parse -> admit -> place -> forward, and again where that fails.

It works on bytes and headers as they came: request models and response classes would cost more than the routing itself.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial

from kvasir_router import request
from kvasir_router.admission.queued_request import QueuedRequest
from kvasir_router.admission.tenant_limits import TenantLimits
from kvasir_router.api_keys import ApiKeys
from kvasir_router.dialects.dialect import ABSENT
from kvasir_router.errors import (
    BadGatewayError,
    PrefillFailedError,
    RequestError,
    RouterStoppingError,
    StreamInterruptedError,
    StreamMovedError,
    UpstreamConnectError,
    UpstreamDoubtfulError,
    UpstreamError,
)
from kvasir_router.job import Job, while_alive
from kvasir_router.metrics import Metrics
from kvasir_router.placement.placement import Fetch, Placement
from kvasir_router.relay.body import LOOP_BYTES, LargeBodies
from kvasir_router.relay.exchange import Exchange, KeepAlives
from kvasir_router.relay.headers import RawHeaders
from kvasir_router.relay.kv_transfer import lookup_params, without_clients_params
from kvasir_router.relay.proxy import BUSY_STATUS, DOUBTFUL_STATUS, Proxy, forwarded_headers
from kvasir_router.relay.upstream_pool import Sending
from kvasir_router.remote_prefill import PrefillLeg, RemotePrefills
from kvasir_router.request import InferenceRequest, deadline_seconds_of
from kvasir_router.service.ledger import Ticket
from kvasir_router.service.service import Service, Services

logger = logging.getLogger(__name__)

# What nginx made customary for "client closed request"; only metrics ever show it.
_CLIENT_CLOSED_STATUS = 499


@dataclass(frozen=True)
class Parts:
    """What the handler works with, built once in `server`."""

    services: Services
    api_keys: ApiKeys | None  # None: open to everybody
    tenant_limits: TenantLimits
    proxy: Proxy
    remote_prefills: RemotePrefills
    metrics: Metrics


class Handler:
    """Of every request that is forwarded."""

    def __init__(
        self, parts: Parts, num_retries: int, keep_alive_seconds: float = 0.0, loop_bytes: int = LOOP_BYTES
    ) -> None:
        """`keep_alive_seconds`: see KeepAlives; `loop_bytes`: see LargeBodies."""
        self._parts = parts
        self._keep_alives = KeepAlives(keep_alive_seconds, asyncio.get_running_loop())
        self._num_retries = num_retries
        self._large_bodies = LargeBodies(loop_bytes)

    async def handle(self, exchange: Exchange) -> None:
        """Every request gets an answer here, and is counted once."""
        job: Job | None = None
        status = 500
        self._parts.metrics.in_flight.inc()
        try:
            job = await self._receive(exchange)
            if job.request.is_stream and job.request.num_output_tokens:
                self._keep_alives.watch(exchange)
            status = await self._answer(job)
            if status >= 400:
                logger.info("the engine's own answer", extra={"request_id": exchange.request_id, "status": status})
            exchange.end()
        except RequestError as error:
            status = error.status
            logger.info("%s", error, extra={"request_id": exchange.request_id, "status": status})
            exchange.fail(error)
        except asyncio.CancelledError:
            # The client is gone, or the time to drain is over. The task ends here: no cancellation is lost.
            status = _CLIENT_CLOSED_STATUS if exchange.has_client_left else RouterStoppingError.status
            if not exchange.has_client_left:
                exchange.fail(RouterStoppingError("the router is stopping and cannot wait for this answer any longer"))
        except Exception:
            logger.exception("a request failed", extra={"request_id": exchange.request_id})
            exchange.fail(RequestError("the router failed to handle this request; its log says why"))
        finally:
            self._keep_alives.forget(exchange)
            exchange.drop()
            self._count(exchange, job, status)

    async def _receive(self, exchange: Exchange) -> Job:
        """The request as far as it concerns routing. Raises RequestError for whoever may not ask or asks nonsense."""
        api_keys = self._parts.api_keys
        tenant = None if api_keys is None else api_keys.tenant_of(exchange.headers)
        content = await exchange.receive()
        async with self._large_bodies.turn(len(content)):
            return await self._understand(exchange, content, tenant)

    async def _understand(self, exchange: Exchange, content: bytes, tenant: str | None) -> Job:
        headers, body_received = exchange.headers, time.perf_counter()
        read = partial(self._large_bodies.read, len(content))
        if exchange.translated is not None:
            content = await read(partial(exchange.translated, content))
        fields = await read(partial(request.read_fields, exchange.dialect, content))
        service = self._parts.services.of(request.model_of(fields))
        inference = await request.parse(
            request.Envelope(exchange.request_id, headers, tenant, exchange.dialect),
            fields,
            service.catalog.resolve,
            service.index,
            read,
        )
        if fields.kv_transfer_params is not ABSENT:
            content = without_clients_params(fields, content)
        exchange.body.content = await read(partial(request.engine_body, inference, content))
        forwarded = forwarded_headers(
            headers,
            exchange.request_id,
            tenant,
            service.router_secret,
            is_stream=inference.is_stream,
            is_resumable=inference.is_resumable,
        )
        queued = self._queued(inference, headers, service)
        return Job(exchange, service, inference, queued, forwarded, body_received, self._num_retries)

    def _queued(self, inference: InferenceRequest, headers: RawHeaders, service: Service) -> QueuedRequest:
        """What admission must know. Raises InvalidDeadlineError (400) and TenantRateLimitError (429)."""
        tenant, num_tokens = inference.tenant or "", inference.num_prompt_tokens
        deadline_seconds = deadline_seconds_of(headers)
        self._parts.tenant_limits.charge(tenant, num_tokens, time.perf_counter())
        estimate = partial(service.least_work, inference)
        return QueuedRequest(inference.model, tenant, num_tokens, inference.priority, deadline_seconds, estimate)

    async def _answer(self, job: Job) -> int:
        """Tries placements until one gives the answer, or the rest of a stream that others have begun."""
        job.service.prober.count_request()
        job.service.retry_budget.count_request(time.perf_counter())
        while True:
            placement = await self._place(job)
            job.count_attempt(placement)
            try:
                with self._parts.tenant_limits.in_flight(job.queued.tenant):
                    return await self._forward(job, placement)
            except PrefillFailedError:
                job.forget_attempt(placement)
                job.service.withdraw(job.request, placement.leg.endpoint.url)
            except StreamMovedError as move:
                logger.info("%s", move, extra={"request_id": job.exchange.request_id})
                job.count_move(placement.leg.endpoint.url)
            except UpstreamError as error:
                if job.exchange.has_whole_stream:
                    return 200
                self._decide_on_retry(job, placement, error)

    async def _place(self, job: Job) -> Placement:
        """Admission and placement; nothing is awaited between them and the dispatch, so there is still room."""
        job.queued.has_begun = job.exchange.has_started
        if not job.queued.has_begun:
            job.service.ask_for_engine()
        while True:
            try:
                waited_seconds = await job.service.admission.admit(job.queued, job.waited_seconds)
            except RequestError as error:
                if job.queued.has_begun:
                    message = f"the engine stopped in the middle of its answer, and {error}"
                    raise StreamInterruptedError(message) from error
                self._parts.tenant_limits.refund(job.queued.tenant, job.queued.num_tokens)
                raise
            job.count_wait(waited_seconds)
            placement = job.service.place(
                job.request,
                job.tried,
                moved_from=job.moved_from,
                num_generated_tokens=job.num_generated_tokens,
            )
            if placement is not None:
                return placement

    async def _forward(self, job: Job, placement: Placement) -> int:
        """What is sent at once is counted while the engine has it already; nothing is awaited between."""
        fetch = placement.fetch
        lookup = None if fetch is None else lookup_params(fetch.peer_url, fetch.peer_port)
        sending = None if placement.prefill else self._send(job, placement.leg.endpoint.url, lookup)
        tickets = job.service.dispatch(job.request, placement, has_waited=job.queue_wait_seconds > 0)
        self._parts.metrics.count_dispatch(job.request, placement, job.service.policy, self._own_seconds(job))
        ticket = tickets[0]
        release = None if placement.prefill else self._release_when_expected(job.request, ticket)
        try:
            with while_alive(ticket, lambda is_silent: _can_go_elsewhere(job, ticket.url, is_silent)):
                if sending is not None:
                    return await self._attempt(job, ticket, sending, None, fetch)
                async with self._parts.remote_prefills.beside(job, placement, tickets) as prefill:
                    sending = self._send(job, ticket.url, prefill.kv_transfer_params)
                    return await self._attempt(job, ticket, sending, prefill, None)
        finally:
            if release is not None:
                release.cancel()
            for each in tickets:
                each.finish()

    def _send(self, job: Job, url: str, kv_transfer_params: bytes | None) -> Sending:
        journal = job.exchange.journal if job.exchange.has_started else None
        return self._parts.proxy.send(
            job.exchange, job.headers, url, journal=journal, kv_transfer_params=kv_transfer_params
        )

    async def _attempt(
        self, job: Job, ticket: Ticket, sending: Sending, prefill: PrefillLeg | None, fetch: Fetch | None
    ) -> int:
        """From the beginning, or from what the client has. `prefill` None: there is one leg only."""
        exchange, journal = job.exchange, job.exchange.journal
        if exchange.has_started and journal is not None:
            return await self._parts.proxy.resume(
                exchange, sending, journal, on_first_byte=lambda _: self._note_resumption(job, ticket, prefill)
            )
        has_other = (
            job.can_fail_again
            and job.service.retry_budget.has_left(time.perf_counter())
            and job.service.registry.can_place(job.request.model, job.tried)
        )
        return await self._parts.proxy.forward(
            exchange,
            sending,
            relay_unavailable=not has_other,
            on_first_byte=lambda status: self._note_first_byte(job, ticket, prefill, fetch, status),
        )

    def _decide_on_retry(self, job: Job, placement: Placement, error: UpstreamError) -> None:
        """Raises RequestError when that was the last attempt."""
        can_retry = job.count_failure(placement.leg.endpoint.url, error)
        is_over_budget = can_retry and not self._takes_retry(job, error)
        self._note_failure(job, placement, error, is_last=not can_retry or is_over_budget)
        if can_retry and not is_over_budget:
            return
        if job.exchange.has_started:
            raise StreamInterruptedError(str(error)) from error
        reason = "; too many requests are being repeated already" if is_over_budget else ""
        raise BadGatewayError(f"no engine answered; the last attempt: {error}{reason}") from error

    def _takes_retry(self, job: Job, error: UpstreamError) -> bool:
        """A stream that has begun always goes on, and an engine that refused the connection has not been asked."""
        if job.exchange.has_started or isinstance(error, UpstreamConnectError):
            return True
        if job.service.retry_budget.take(time.perf_counter()):
            return True
        self._parts.metrics.retries_refused.inc()
        return False

    def _own_seconds(self, job: Job) -> float | None:
        """What the router itself has added so far: neither the client's sending nor the queue; None once it answers."""
        if job.exchange.has_started:
            return None
        return max(time.perf_counter() - job.body_received - job.queue_wait_seconds, 0.0)

    def _release_when_expected(self, inference: InferenceRequest, ticket: Ticket) -> asyncio.TimerHandle | None:
        """Of an answer in one piece the first byte comes long after the prefill: that is taken to last as expected."""
        if inference.is_stream or not inference.num_output_tokens:
            return None
        return asyncio.get_running_loop().call_later(ticket.expected_prefill_seconds, ticket.release_prefill)

    def _note_first_byte(
        self, job: Job, ticket: Ticket, prefill: PrefillLeg | None, fetch: Fetch | None, status: int
    ) -> None:
        now = time.perf_counter()
        if prefill is not None:
            prefill.decode_has_begun(now, is_from_start=status == 200)
        if status in _SAYS_NOTHING:  # and was relayed for want of another: the next request may have one
            job.service.in_flight_limits.busy(ticket.url)
        else:
            job.service.in_flight_limits.answered(ticket.url, is_error=_is_endpoints_fault(status))
        if status == 200:
            job.note_answer()
        if status == 200 and not job.request.is_stream:
            ticket.whole_answer(now)
        elif status == 200:
            if fetch is not None and job.service.fetching is not None:
                job.service.fetching.learn(fetch, ticket.url, ticket.seconds_late(now), now)
            ticket.first_token(now)
            self._parts.metrics.time_to_first_byte(job.request.model or "").observe(now - job.exchange.arrived)

    def _note_resumption(self, job: Job, ticket: Ticket, prefill: PrefillLeg | None) -> None:
        if prefill is not None:
            prefill.decode_has_begun(time.perf_counter(), is_from_start=False)
        job.service.in_flight_limits.answered(ticket.url, is_error=False)
        ticket.first_token(time.perf_counter(), job.num_generated_tokens)
        self._parts.metrics.streams_resumed(job.lost_reason).inc()
        fields = {"request_id": job.exchange.request_id, "endpoint": ticket.url}
        logger.info("a stream lost elsewhere goes on (%s)", job.lost_reason, extra=fields)

    def _note_failure(self, job: Job, placement: Placement, error: UpstreamError, *, is_last: bool) -> None:
        endpoint = placement.leg.endpoint
        logger.warning("%s", error, extra={"request_id": job.exchange.request_id, "endpoint": endpoint.url})
        self._parts.metrics.upstream_errors(error.reason).inc()
        self._parts.metrics.revision_errors(endpoint.revision, error.reason).inc()
        if not is_last:
            self._parts.metrics.retries(error.reason).inc()
        job.service.note_failure(endpoint.url, error)
        if isinstance(error, UpstreamDoubtfulError):
            job.note_refusal(endpoint.url)
        if not job.exchange.has_started:
            job.service.withdraw(job.request, endpoint.url)

    def _count(self, exchange: Exchange, job: Job | None, status: int) -> None:
        """A model that is not served here is the client's invention and must not make a series: its label is empty."""
        model, queue_wait_seconds = "", 0.0
        if job is not None:
            asked, queue_wait_seconds = job.request.model, job.queue_wait_seconds
            model = asked if asked is not None and job.service.catalog.is_known(asked) else ""
            if job.revision is not None:
                self._parts.metrics.revision_requests(job.revision, str(status)).inc()
        self._parts.metrics.count_end(model, status, time.perf_counter() - exchange.arrived, queue_wait_seconds)


def _can_go_elsewhere(job: Job, url: str, is_silent: bool) -> bool:
    """A request whose endpoint is merely silent stays there unless another can take it now: beside a busy engine the
    next is busy too, and everything would be computed twice."""
    return job.exchange.can_go_elsewhere and (not is_silent or job.service.registry.can_place(job.request.model, {url}))


_SAYS_NOTHING = DOUBTFUL_STATUS | {BUSY_STATUS}
"""Of an only endpoint: neither that it is well nor that it fails."""


def _is_endpoints_fault(status: int) -> bool:
    """Of an answer that is relayed. 501 is the request's, and 503 is relayed where it is the only endpoint's."""
    return status >= 500 and status not in (501, 503)
