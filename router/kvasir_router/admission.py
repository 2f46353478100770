"""The bounded queue in front of the endpoints: first come, first served, among requests that some endpoint can take.

A request that can start at once never enters it. Invariant: a waiter stays in the queue until it has really started, so
a newcomer cannot slip past one that was just woken. Streams that have to go on elsewhere come before all that have not
begun, and are never refused.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvasir_router.errors import QueueFullError, QueueWaitExceededError

# A full queue drains within moments; an absent endpoint takes a pod start to come back.
_QUEUE_FULL_RETRY_SECONDS = 1
_NO_ENDPOINT_RETRY_SECONDS = 5


@dataclass(eq=False)
class _Waiter:
    can_start: Callable[[], bool]
    woken: asyncio.Future[None]


class Admission:
    def __init__(self, max_queue_size: int, max_queue_wait_seconds: float) -> None:
        self._max_queue_size = max_queue_size
        self._max_queue_wait_seconds = max_queue_wait_seconds
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()  # in order of arrival

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def admit(
        self, can_start: Callable[[], bool], waited_seconds: float = 0.0, *, has_begun: bool = False
    ) -> float:
        """Returns once `can_start()` holds, with the seconds waited; the caller must take its place without awaiting.

        `waited_seconds`: what this request has already spent here before a retry. `has_begun`: its client has a part of
        the answer. Raises QueueFullError (429) or QueueWaitExceededError (503).
        """
        if (has_begun or not self._waiters) and can_start():
            return 0.0
        if len(self._waiters) >= self._max_queue_size and not has_begun:
            raise QueueFullError(
                f"{len(self._waiters)} requests are already waiting, the most this router holds; try again later",
                retry_after_seconds=_QUEUE_FULL_RETRY_SECONDS,
            )
        return await self._wait(can_start, self._max_queue_wait_seconds - waited_seconds, is_first=has_begun)

    def wake(self) -> None:
        """To be called when an endpoint becomes usable or has room again: lets the first fitting waiter start."""
        for waiter in self._waiters:
            if waiter.woken.done():
                return  # it starts in this turn of the loop and wakes the next one itself
            if waiter.can_start():
                waiter.woken.set_result(None)
                return

    async def _wait(self, can_start: Callable[[], bool], budget_seconds: float, *, is_first: bool) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        waiter = _Waiter(can_start, loop.create_future())
        self._waiters[waiter] = None
        if is_first:
            self._waiters.move_to_end(waiter, last=False)
        try:
            async with asyncio.timeout(budget_seconds):
                await self._until_started(waiter)
        except TimeoutError as error:
            raise QueueWaitExceededError(
                f"no endpoint could take the request within {self._max_queue_wait_seconds:g} s; try again later",
                retry_after_seconds=_NO_ENDPOINT_RETRY_SECONDS,
            ) from error
        finally:
            del self._waiters[waiter]
            # After the caller has taken its place, which it does without awaiting.
            loop.call_soon(self.wake)
        return loop.time() - start

    async def _until_started(self, waiter: _Waiter) -> None:
        self.wake()
        await waiter.woken
        while not waiter.can_start():  # the place went away between the wake and now
            waiter.woken = asyncio.get_running_loop().create_future()
            self.wake()  # those behind it, which it kept asleep
            await waiter.woken
