"""The bounded queue in front of the endpoints: first come, first served, among requests that some endpoint can take.

A request that can start at once never enters it. Invariant: a waiter stays in the queue until it has really started, so
a newcomer cannot slip past one that was just woken.
"""

import asyncio
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
        self._waiters: dict[_Waiter, None] = {}  # in order of arrival

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def admit(self, can_start: Callable[[], bool], waited_seconds: float = 0.0) -> float:
        """Returns once `can_start()` holds, with the seconds waited; the caller must take its place without awaiting.

        `waited_seconds`: what this request has already spent here before a retry. Raises QueueFullError (429) or
        QueueWaitExceededError (503).
        """
        if not self._waiters and can_start():
            return 0.0
        if len(self._waiters) >= self._max_queue_size:
            raise QueueFullError(
                f"{len(self._waiters)} requests are already waiting, the most this router holds; try again later",
                retry_after_seconds=_QUEUE_FULL_RETRY_SECONDS,
            )
        return await self._wait(can_start, self._max_queue_wait_seconds - waited_seconds)

    def wake(self) -> None:
        """To be called when an endpoint becomes usable or has room again: lets the first fitting waiter start."""
        for waiter in self._waiters:
            if waiter.woken.done():
                return  # it starts in this turn of the loop and wakes the next one itself
            if waiter.can_start():
                waiter.woken.set_result(None)
                return

    async def _wait(self, can_start: Callable[[], bool], budget_seconds: float) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        waiter = _Waiter(can_start, loop.create_future())
        self._waiters[waiter] = None
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
            await waiter.woken
