"""The bounded queue in front of one service's endpoints, as coroutines that wait in it.

A request that can start at once never enters it. While every engine has enough to do, requests stay here, so that their
order is the router's. Which of them is next is the queue's business; here are the event loop, the time limits and the
refusals.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvasir_router.admission.queue import HeldDemand, RequestQueue
from kvasir_router.admission.queued_request import QueuedRequest, Waiting
from kvasir_router.admission.tenant_limits import TenantLimits
from kvasir_router.errors import (
    DeadlineExceededError,
    QueueFullError,
    QueueWaitExceededError,
    RequestError,
    TenantInFlightLimitError,
)

# Where nothing has drained yet: a full queue does so within moments, an absent endpoint takes a pod start to come.
_QUEUE_FULL_RETRY_SECONDS = 1
_NO_ENDPOINT_RETRY_SECONDS = 5
_MAX_RETRY_SECONDS = 60
_LEAST_WAKE_SECONDS = 0.001  # clocks differ a little


# Weighs the last half minute most: an engine that is gone or has come changes the rate within that time.
_MEMORY_SECONDS = 30.0


class DrainRate:
    """Prompt tokens started per second of the time in which something waited: sums that decay with time."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None  # the last start, or when the queue filled; None: nothing waits

    def began(self, now: float) -> None:
        """Something waits from now on. May be repeated."""
        if self._since is None:
            self._since = now

    def ended(self, now: float) -> None:
        """Nothing waits any more."""
        self._count(0, now)
        self._since = None

    def started(self, num_tokens: int, now: float) -> None:
        """A request that waited has started."""
        self._count(num_tokens, now)

    def tokens_per_second(self, now: float) -> float | None:
        """None until requests have waited for a moment."""
        num_tokens, seconds = self._sums(now)
        return num_tokens / seconds if seconds > 0 else None

    def seconds_for(self, num_tokens: int, now: float) -> float | None:
        """None where nothing is known, or nothing drains."""
        rate = self.tokens_per_second(now)
        return num_tokens / rate if rate else None

    def _count(self, num_tokens: int, now: float) -> None:
        self._num_tokens, self._seconds = self._sums(now)
        self._num_tokens += num_tokens
        self._since = now

    def _sums(self, now: float) -> tuple[float, float]:
        elapsed = 0.0 if self._since is None else now - self._since
        decay = math.exp(-elapsed / _MEMORY_SECONDS)
        return self._num_tokens * decay, self._seconds * decay + elapsed


@dataclass(frozen=True, slots=True)
class QueueLimits:
    max_requests: int
    max_wait_seconds: float


SecondsToRoom = Callable[[str | None, Callable[[], float]], float]


class Admission:
    """`seconds_to_room`: until some endpoint can take a request for the model (None: for any) that has this response
    ratio, by time alone. 0.0: now; inf: not before something happens.
    """

    def __init__(self, seconds_to_room: SecondsToRoom, limits: QueueLimits, tenant_limits: TenantLimits) -> None:
        self._seconds_to_room = seconds_to_room
        self._limits = limits
        self._tenant_limits = tenant_limits
        self._queue = RequestQueue(limits.max_requests)
        self._drain = DrainRate()
        self._wakings: dict[QueuedRequest, asyncio.Future[bool]] = {}  # False: it makes way for another
        self._timer: asyncio.TimerHandle | None = None  # for when time alone will have made room

    def configure(self, limits: QueueLimits) -> None:
        """Holds for requests that come from now on."""
        self._limits = limits
        self._queue.max_requests = limits.max_requests

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def max_wait_seconds(self) -> float:
        """Of requests that come from now on."""
        return self._limits.max_wait_seconds

    def held_demand(self) -> Mapping[str, HeldDemand]:
        """What waits here, by tenant."""
        return self._queue.held_demand()

    def next_waiting(self) -> Waiting | None:
        """Of the request whose turn it is among those that have not begun."""
        now = _now()
        request = self._queue.next_in_turn(self._tenant_limits.may_start, now)
        return None if request is None else Waiting(now - request.arrived, request.counted_work)

    async def admit(self, request: QueuedRequest, waited_seconds: float = 0.0) -> float:
        """Returns, once it can start, the seconds waited; the caller must take its place, at an endpoint and in the
        tenant's limits, without awaiting.

        `waited_seconds`: what this request has already spent here before a retry. Raises QueueFullError,
        TenantInFlightLimitError (429), DeadlineExceededError or QueueWaitExceededError (503).
        """
        if self._can_start_at_once(request):
            return 0.0
        request.arrived, request.work = _now() - waited_seconds, request.estimate()
        return await self._wait(request, waited_seconds)

    def refuse_all(self, error: Callable[[], RequestError]) -> None:
        """Of what waits here now: nobody will take it any more."""
        for waking in self._wakings.values():
            if not waking.done():
                waking.set_exception(error())

    def wake(self) -> None:
        """To be called when an endpoint becomes usable or has room again: the request whose turn it is starts."""
        if not self._wakings:
            return  # perhaps no loop runs yet
        seconds: list[float] = []

        def can_start(model: str | None, response_ratio: Callable[[], float]) -> bool:
            seconds.append(self._seconds_to_room(model, response_ratio))
            return not seconds[-1]

        request = self._queue.wake_next(can_start, self._tenant_limits.may_start, _now())
        # It starts in the next turn of the loop, and then wakes another; so it does where it was just cancelled.
        if request is not None and not self._wakings[request].done():
            self._wakings[request].set_result(True)
        self._wake_in(min(filter(None, seconds), default=math.inf))

    def _wake_in(self, seconds: float) -> None:
        """Whatever happens earlier wakes as well."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(seconds, _LEAST_WAKE_SECONDS), self.wake)

    def _can_start_at_once(self, request: QueuedRequest) -> bool:
        is_first = not (self._queue.num_begun if request.has_begun else self._wakings)
        return is_first and self._has_place(request, float)

    def _has_place(self, request: QueuedRequest, response_ratio: Callable[[], float]) -> bool:
        may_start = request.has_begun or self._tenant_limits.may_start(request.tenant)
        return may_start and not self._seconds_to_room(request.model, response_ratio)

    async def _wait(self, request: QueuedRequest, waited_seconds: float) -> float:
        start = _now()
        self._enter(request, start)
        try:
            async with asyncio.timeout(self._limit_seconds(request) - waited_seconds):
                await self._until_started(request)
        except TimeoutError as error:
            raise self._waited_too_long(request) from error
        finally:
            self._leave(request)
            # After the caller has taken its place, which it does without awaiting.
            asyncio.get_running_loop().call_soon(self.wake)
        return _now() - start

    def _enter(self, request: QueuedRequest, now: float) -> None:
        """Where the queue is full, one that is in it makes way, or this one is refused."""
        makes_way = self._queue.push(request)
        if makes_way is request:
            raise self._queue_full()
        self._drain.began(now)
        self._wakings[request] = asyncio.get_running_loop().create_future()
        if makes_way is not None and not self._wakings[makes_way].done():
            self._wakings[makes_way].set_result(False)

    def _leave(self, request: QueuedRequest) -> None:
        del self._wakings[request]
        self._queue.remove(request)
        if not len(self._queue):
            self._drain.ended(_now())

    async def _until_started(self, request: QueuedRequest) -> None:
        self.wake()
        while True:
            if not await self._wakings[request]:
                raise self._queue_full()
            if self._has_place(request, partial(request.response_ratio, _now())):
                break
            # The place went away between the wake and now; perhaps there is one for another.
            self._wakings[request] = asyncio.get_running_loop().create_future()
            self._queue.put_back(request)
            self.wake()
        self._queue.started(request)
        self._drain.started(request.cost_tokens, _now())

    def _limit_seconds(self, request: QueuedRequest) -> float:
        if request.deadline_seconds is None or request.has_begun:
            return self._limits.max_wait_seconds
        return min(self._limits.max_wait_seconds, request.deadline_seconds)

    def _queue_full(self) -> QueueFullError:
        return QueueFullError(
            f"{self._limits.max_requests} requests are already waiting, the most this router holds, and no tenant has "
            "more there than this one; try again later",
            retry_after_seconds=self._retry_after(_QUEUE_FULL_RETRY_SECONDS),
        )

    def _waited_too_long(self, request: QueuedRequest) -> RequestError:
        limit_seconds = self._limit_seconds(request)
        retry_after_seconds = self._retry_after(_NO_ENDPOINT_RETRY_SECONDS)
        if not request.has_begun and not self._tenant_limits.may_start(request.tenant):
            return TenantInFlightLimitError(
                f"the tenant {request.tenant} had as many requests in flight as it may for {limit_seconds:g} s; "
                "wait for some of them to end",
                retry_after_seconds=retry_after_seconds,
            )
        if limit_seconds == request.deadline_seconds:
            return DeadlineExceededError(
                f"the request could not start within the {limit_seconds:g} s of its deadline; try again later",
                retry_after_seconds=retry_after_seconds,
            )
        return QueueWaitExceededError(
            f"no endpoint could take the request within {limit_seconds:g} s; try again later",
            retry_after_seconds=retry_after_seconds,
        )

    def _retry_after(self, default_seconds: int) -> int:
        """The time in which what waits now will have started, at the measured rate."""
        seconds = self._drain.seconds_for(self._queue.cost_tokens, _now())
        return default_seconds if seconds is None else min(max(math.ceil(seconds), 1), _MAX_RETRY_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()
