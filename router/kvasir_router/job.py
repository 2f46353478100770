"""One request on its way through the router: what it is, where it has failed, and whether it may be tried once more."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvasir_router.admission.queued_request import QueuedRequest
from kvasir_router.errors import (
    UpstreamBrokenError,
    UpstreamBusyError,
    UpstreamConnectError,
    UpstreamError,
    UpstreamRefusedError,
    UpstreamUnresponsiveError,
)
from kvasir_router.placement.placement import Placement
from kvasir_router.relay.exchange import Exchange
from kvasir_router.request import InferenceRequest
from kvasir_router.service.ledger import Ticket
from kvasir_router.service.service import Service


@dataclass(slots=True)
class Job:
    """Failures and waiting are counted afresh whenever the client has got more of a stream since the last failure.

    That an endpoint will not go on with a stream is no failure the first time, so that there may be many such: all
    engines that died together, or most of them renewed. The stream then gets to one that does, or to the queue.
    Nor is it one that an engine hands a stream over, and where it is to go on may fail without being counted: the
    stream ran well.
    """

    exchange: Exchange
    service: Service
    request: InferenceRequest
    queued: QueuedRequest  # the same as admission sees it
    headers: bytes  # to be forwarded, as lines
    body_received: float
    max_failures: int
    queue_wait_seconds: float = 0.0  # altogether
    waited_seconds: float = 0.0  # since the stream last got further
    tried: set[str] = field(default_factory=set)  # endpoints that have failed
    revision: str | None = None  # of the endpoint tried last; None: it got to none
    lost_reason: str = ""  # why the stream had to go elsewhere
    _is_answered: bool = False  # an engine has begun to, and refuses nothing
    _doubted: set[str] = field(default_factory=set)  # endpoints that refused it, by whose fault is not known yet
    _begun_by: str | None = None  # revision of the endpoint that has got the stream this far
    _refused_by: set[str] = field(default_factory=set)  # since the stream last got further
    _num_failures: int = 0
    _num_bytes_kept: int = 0  # of the journal at the last failure

    @property
    def can_fail_again(self) -> bool:
        return self._num_failures < self.max_failures

    @property
    def moved_from(self) -> str | None:
        """Revision of the engine that has let go of the stream and keeps its KV; None: no engine does."""
        journal = self.exchange.journal
        return self._begun_by if journal is not None and journal.is_moved else None

    @property
    def num_generated_tokens(self) -> int:
        """Of the stream, that its client has: about as many as it has events."""
        return 0 if self.exchange.journal is None else self.exchange.journal.num_events

    def count_wait(self, seconds: float) -> None:
        self.queue_wait_seconds += seconds
        self.waited_seconds += seconds

    def count_attempt(self, placement: Placement) -> None:
        self.tried.add(placement.leg.endpoint.url)
        self.revision = placement.leg.endpoint.revision

    def forget_attempt(self, placement: Placement) -> None:
        """It was not the fault of the engine that was to answer, which may be asked again."""
        self.tried.discard(placement.leg.endpoint.url)

    def count_move(self, url: str) -> None:
        """The endpoint has let go of the stream and keeps its KV."""
        self._has_got_further()
        self._begun_by = self.revision
        self._num_failures, self.waited_seconds = -1, 0.0  # the first where it is to go on is not counted
        self.tried, self._refused_by = {url}, set()
        self.lost_reason = "moved"

    def note_answer(self) -> None:
        """An engine answers the request, so nothing was wrong with it where others refused it."""
        self._is_answered = True
        for url in self._doubted:
            self.service.in_flight_limits.answered(url, is_error=True)
        self._doubted.clear()

    def note_refusal(self, url: str) -> None:
        """An error of the engine's, if another answers the request."""
        self._doubted.add(url)
        if self._is_answered:
            self.note_answer()

    def count_failure(self, url: str, error: UpstreamError) -> bool:
        """Whether another attempt may follow."""
        if self._has_got_further():
            self._begun_by = self.revision
            self._num_failures, self.waited_seconds = 0, 0.0
            self.tried, self._refused_by = {url}, set()
        if isinstance(error, (UpstreamBrokenError, UpstreamUnresponsiveError)):
            self.lost_reason = error.reason if self.moved_from is None else "moved"
        if self._is_first_refusal(url, error):
            self._refused_by.add(url)
            return True
        can_retry = self.can_fail_again and self.exchange.can_go_elsewhere
        self._num_failures += 1
        return can_retry

    def _is_first_refusal(self, url: str, error: UpstreamError) -> bool:
        is_refusal = isinstance(error, (UpstreamBusyError, UpstreamConnectError, UpstreamRefusedError))
        return self.exchange.has_started and is_refusal and url not in self._refused_by

    def _has_got_further(self) -> bool:
        journal = self.exchange.journal
        before, self._num_bytes_kept = self._num_bytes_kept, 0 if journal is None else journal.num_bytes
        return self._num_bytes_kept > before


@contextlib.contextmanager
def while_alive(ticket: Ticket, can_go_elsewhere: Callable[[bool], bool]) -> Iterator[None]:
    """Raises UpstreamUnresponsiveError from the block, which belongs to a task. `can_go_elsewhere` is told whether the
    endpoint is merely silent.

    A part of an answer that cannot be continued is left to wait. As `asyncio.timeout`, but without its timer.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancellations = task.cancelling()
    is_interrupted = False

    def interrupt(is_silent: bool) -> None:
        nonlocal is_interrupted
        if not is_interrupted and can_go_elsewhere(is_silent):
            is_interrupted = True
            task.cancel()

    ticket.on_interrupt = interrupt
    try:
        yield
    except asyncio.CancelledError as error:
        if is_interrupted and task.uncancel() <= num_cancellations:
            raise UpstreamUnresponsiveError(f"{ticket.url} answers no more", "unresponsive") from error
        raise
    except BaseException:
        if is_interrupted:
            task.uncancel()
        raise
