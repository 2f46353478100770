"""The prefill leg of a request that another engine decodes: sent with the decode leg, ended with it, never in its way.

Its failure is none of the decode engine's, which could wait long for KV that nobody computes: unless it has begun by
itself, its leg is ended too, and the request placed anew. What the failure says of the prefill engine is counted here,
as `app` does for the engines that answer clients.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from kvasir_router.errors import (
    PrefillFailedError,
    RequestTimeoutError,
    UpstreamError,
    UpstreamLateError,
    UpstreamMalformedError,
    UpstreamRefusedError,
    UpstreamUnresponsiveError,
)
from kvasir_router.job import Job, while_alive
from kvasir_router.metrics import Metrics
from kvasir_router.placement.placement import Placement
from kvasir_router.relay.kv_transfer import NewHandover, params_of_answer, prefill_body, with_lookup
from kvasir_router.relay.proxy import BUSY_STATUS, forwarded_headers, unavailable
from kvasir_router.relay.upstream_answer import UpstreamAnswer
from kvasir_router.relay.upstream_pool import UpstreamPool
from kvasir_router.service.ledger import Ticket

logger = logging.getLogger(__name__)

LATE_SECONDS = 1.0
"""After the decode engine's first byte nobody needs the prefill any more; its answer may still be on its way."""


_MAX_ANSWER_BYTES = 2**20
"""Of one token and where its KV is."""


async def prefill(pool: UpstreamPool, url: str, path: str, headers: bytes, body: bytes) -> bytes:
    """The engine's answer, once it has computed the prompt. Leaving early closes the connection, which makes the engine
    abort. Raises UpstreamError, RequestTimeoutError.
    """
    answer = await pool.post(url, path.encode("latin-1"), headers, [body])
    try:
        _check(answer)
        return await _whole(answer)
    finally:
        answer.close()


def _check(answer: UpstreamAnswer) -> None:
    if answer.status >= 500 or answer.status == BUSY_STATUS:
        raise unavailable(answer)
    if answer.status != 200:
        reason = str(answer.status)
        raise UpstreamRefusedError(f"{answer.url} does not prefill this request: {reason}", reason)


async def _whole(answer: UpstreamAnswer) -> bytes:
    received = bytearray()

    def take(chunk: bytes) -> None:
        if len(received) <= _MAX_ANSWER_BYTES:
            received.extend(chunk)

    await answer.relay(take)
    if len(received) > _MAX_ANSWER_BYTES:
        raise UpstreamMalformedError(
            f"{answer.url} answered a prefill with more than {_MAX_ANSWER_BYTES} bytes", "malformed"
        )
    return bytes(received)


@dataclass(frozen=True)
class RemotePrefills:
    """`port` is that of prefill engines' side channel; see LATE_SECONDS. `clock` is the services'."""

    pool: UpstreamPool
    metrics: Metrics
    new_handover: NewHandover
    port: int
    late_seconds: float = LATE_SECONDS
    clock: Callable[[], float] = time.perf_counter

    @contextlib.asynccontextmanager
    async def beside(self, job: Job, placement: Placement, tickets: Sequence[Ticket]) -> AsyncIterator["PrefillLeg"]:
        """Runs while the block does. It enters at once, or once the answer is there that the decode leg needs.

        Raises PrefillFailedError from the block.
        """
        decode, ticket = tickets
        handover, fetch = self.new_handover(ticket.url, self.port), placement.fetch
        leg = PrefillLeg(self, job, placement, tickets, handover.to_decode)
        told = handover.to_prefill
        if fetch is not None:
            told = with_lookup(told, fetch.peer_url, fetch.peer_port)
        body = prefill_body(job.exchange.body.content, told)
        task = asyncio.create_task(leg.run(body), name=f"prefill {job.exchange.request_id}")
        try:
            if leg.decode_waits_for_it:
                await asyncio.wait([task])
            async with asyncio.timeout(None) as leg.decode_time:
                yield leg
        except TimeoutError as error:
            if leg.decode_time is None or not leg.decode_time.expired():
                raise
            raise PrefillFailedError(f"{ticket.url} does not prefill for {decode.url}") from error
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (failure := task.exception()) is not None:
                logger.error("a prefill leg failed", exc_info=failure, extra={"request_id": job.exchange.request_id})


class PrefillLeg:
    """Of one attempt. `kv_transfer_params` are the decode leg's; None: the decode engine prefills itself."""

    def __init__(
        self,
        prefills: RemotePrefills,
        job: Job,
        placement: Placement,
        tickets: Sequence[Ticket],
        kv_transfer_params: bytes | None,
    ) -> None:
        assert placement.prefill is not None
        self.kv_transfer_params = kv_transfer_params
        self.decode_waits_for_it = kv_transfer_params is None
        self.decode_time: asyncio.Timeout | None = None
        """Ends that of the decode leg."""
        self._has_decode_begun = False
        self._prefills = prefills
        self._job = job
        self._revision = placement.prefill.endpoint.revision
        self._num_tokens = placement.leg.received_tokens
        self._fetch = placement.fetch
        self._decode, self._ticket = tickets
        self._patience: asyncio.Timeout | None = None
        self._prefilled_at: float | None = None
        self._was_decode_prefilling = False
        """When the prefill had ended."""

    async def run(self, body: bytes) -> None:
        try:
            answer = await self._ask(body)
        except UpstreamError as error:
            self._note_failure(error)
        else:
            self._note_prefill(answer)
        finally:
            if self._prefilled_at is None:
                self._job.service.withdraw(self._job.request, self._ticket.url)
            self._ticket.finish()

    def decode_has_begun(self, now: float, *, is_from_start: bool) -> None:
        """Its first byte has come. `is_from_start`: it had nothing to compute but the first token."""
        self._has_decode_begun = True
        if self.decode_time is not None:
            self.decode_time.reschedule(None)  # where the prefill has failed in this very turn of the loop
        if self._prefilled_at is None:
            if self._patience is not None:
                self._patience.reschedule(asyncio.get_running_loop().time() + self._prefills.late_seconds)
        elif is_from_start and self.kv_transfer_params is not None:
            self._learn_transfer(now - self._prefilled_at, now)

    async def _ask(self, body: bytes) -> bytes:
        """Raises UpstreamError."""
        exchange, request = self._job.exchange, self._job.request
        headers = forwarded_headers(
            exchange.headers,
            exchange.request_id,
            request.tenant,
            self._job.service.router_secret,
            is_stream=False,
            is_resumable=False,
        )
        try:
            async with asyncio.timeout(None) as self._patience:
                with while_alive(self._ticket, lambda is_silent: True):
                    return await prefill(self._prefills.pool, self._ticket.url, exchange.path, headers, body)
        except TimeoutError as error:
            message = f"{self._ticket.url} was still prefilling when the decode engine had done it itself"
            raise UpstreamLateError(message, "late") from error
        except RequestTimeoutError as error:
            raise UpstreamUnresponsiveError(str(error), "timeout") from error
        finally:
            self._patience = None

    def _note_prefill(self, answer: bytes) -> None:
        now = self._prefilled_at = self._prefills.clock()
        if self._fetch is not None and self._job.service.fetching is not None:
            self._job.service.fetching.learn(self._fetch, self._ticket.url, self._ticket.seconds_late(now), now)
        self._was_decode_prefilling = self._decode.is_engine_prefilling
        self._ticket.whole_answer(now)
        self._job.service.in_flight_limits.answered(self._ticket.url, is_error=False)
        if self.decode_waits_for_it:
            self.kv_transfer_params = params_of_answer(answer)
            if self.kv_transfer_params is None:
                self._decode_prefills()

    def _note_failure(self, error: UpstreamError) -> None:
        url = self._ticket.url
        logger.warning("%s", error, extra={"request_id": self._job.exchange.request_id, "prefill_endpoint": url})
        self._prefills.metrics.count_remote_prefill_error(self._revision, error.reason)
        self._job.tried.add(url)
        self._job.service.note_failure(url, error)
        if isinstance(error, UpstreamRefusedError):
            self._job.note_refusal(url)
        if self.decode_waits_for_it:
            self._decode_prefills()
        elif not self._has_decode_begun and self.decode_time is not None:
            self.decode_time.reschedule(asyncio.get_running_loop().time())
        elif isinstance(error, UpstreamLateError):
            self._ticket.first_token(self._prefills.clock())  # it takes at least as long

    def _decode_prefills(self) -> None:
        self._decode.prefill_after_all(self._prefills.clock())
        if not self._job.request.is_stream:  # nothing will tell when it is done
            seconds = self._decode.expected_prefill_seconds
            asyncio.get_running_loop().call_later(seconds, self._decode.release_prefill)

    def _learn_transfer(self, seconds: float, now: float) -> None:
        """Where the first byte is the first token, which it is of streams. A wait for prompts that the decode engine
        computes itself says nothing of transfers; taken for one, it would bring that engine more of such prompts.
        """
        pairing = self._job.service.pairing
        if pairing is None or not self._job.request.is_stream:
            return
        self._prefills.metrics.kv_transfer_seconds.observe(seconds)
        if not self._was_decode_prefilling and not self._decode.is_engine_prefilling:
            pairing.transfers.observe(self._ticket.url, self._decode.url, self._num_tokens, seconds, now)
