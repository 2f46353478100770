"""Request bodies while they are held, all of this process together within one budget of bytes. The journals of streams
are taken from it as well, up to a bound, so that bodies always have room; and journals have a little of their own, so
that a burst of bodies does not end them.

A body is held from its first byte, in the queue as well, until nothing can need it any more: no other attempt, and no
engine that goes on with its stream. Whoever handles the request drops it at the latest.

What is made of a body until its prompt is hashed takes several times its bytes. So few of those that are not small are
worked on at once (`LargeBodies`), and what would hold up the event loop is done in a thread. A thread cannot be
cancelled: who is cancelled while it reads ends when the thread has, and holds the body until then.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from kvasir_http.connections import ClientLimits
from kvasir_router.errors import BodyBudgetExceededError, BodyTimeoutError, BodyTooLargeError, RequestError

# Bodies come and go with the requests that they are of.
_RETRY_SECONDS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimes(ClientLimits):
    body_seconds: float = 30.0
    """For a request's body, and one more for every `body_bytes_per_second` that have come."""
    body_bytes_per_second: float = 64 * 1024


CLIENT_TIMES = ClientTimes()


class BodyBudget:
    """Journals have at most half as much, an eighth of it beside what bodies may take. Fewer bytes than none are given
    back, which always succeeds.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_journal_bytes = max_bytes // 2
        self._own_journal_bytes = max_bytes // 8
        self._num_body_bytes = 0
        self._num_journal_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_body_bytes + self._num_journal_bytes

    def take(self, num_bytes: int) -> None:
        """For a body. Raises BodyBudgetExceededError (503)."""
        if not self._is_enough(self._num_body_bytes + num_bytes, self._num_journal_bytes):
            raise BodyBudgetExceededError(
                f"the router holds {self.num_bytes} bytes of requests already, of at most {self._max_bytes} "
                "(--max-held-body-size, or 5/16 of its memory limit where that is less); try again later",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._num_body_bytes += num_bytes

    def take_for_journal(self, num_bytes: int) -> bool:
        """Nothing is taken where that is too much."""
        num_journal_bytes = self._num_journal_bytes + num_bytes
        if num_journal_bytes > self._max_journal_bytes or not self._is_enough(self._num_body_bytes, num_journal_bytes):
            return False
        self._num_journal_bytes = num_journal_bytes
        return True

    def _is_enough(self, num_body_bytes: int, num_journal_bytes: int) -> bool:
        return num_body_bytes + max(num_journal_bytes - self._own_journal_bytes, 0) <= self._max_bytes


class Body:
    """One request's: the connection feeds it, the handler reads it. Its reader may change `content`; the budget counts
    what the client has sent. After a refusal, and once dropped, what still comes is not held.
    """

    def __init__(
        self, budget: BodyBudget, max_bytes: int, announced_bytes: int = 0, times: ClientTimes = CLIENT_TIMES
    ) -> None:
        self.content = b""
        self.is_over = False  # whole, or refused
        self.budget = budget
        self._max_bytes = max_bytes
        self._times = times
        self._first = b""
        self._all = bytearray()  # once there are two chunks: one that grows leaves no holes in memory, as a join would
        self._num_bytes = 0
        self._refusal: RequestError | None = None
        self._is_dropped = False
        self._waiter: asyncio.Future[None] | None = None
        if announced_bytes > max_bytes:
            self._refuse(self._too_large())

    # For the connection

    def feed(self, chunk: bytes) -> None:
        if self.is_over or self._is_dropped:
            return
        if self._num_bytes + len(chunk) > self._max_bytes:
            self._refuse(self._too_large())
            return
        try:
            self.budget.take(len(chunk))
        except BodyBudgetExceededError as error:
            self._refuse(error)
            return
        if not self._num_bytes:
            self._first = chunk
        elif self._all:
            self._all += chunk
        else:
            self._all += self._first
            self._all += chunk
        self._num_bytes += len(chunk)

    def end(self) -> None:
        if self.is_over or self._is_dropped:
            return
        self.is_over = True
        self.content = cast(bytes, self._all) if self._all else self._first
        self._forget()
        self._wake()

    # For the handler

    async def read(self) -> None:
        """Raises BodyTooLargeError (413), before anything comes where the length is announced, BodyTimeoutError (408)
        and BodyBudgetExceededError (503).
        """
        if not self.is_over:
            await self._until_over()
        if self._refusal is not None:
            raise self._refusal

    def drop(self) -> None:
        """May be repeated."""
        self._is_dropped = True
        self.budget.take(-self._num_bytes)
        self._num_bytes = 0
        self._forget()
        self.content = b""

    def _forget(self) -> None:
        self._first, self._all = b"", bytearray()

    async def _until_over(self) -> None:
        """A chunk does not wake the reader: when the time is over, what has come by then may have earned more."""
        loop = asyncio.get_running_loop()
        begin, times = loop.time(), self._times
        self._waiter = loop.create_future()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            seconds_left = begin + times.body_seconds + self._num_bytes / times.body_bytes_per_second - loop.time()
            if seconds_left > 0:
                timer = loop.call_later(seconds_left, look)
            else:
                message = f"the request body stalled after {self._num_bytes} bytes; send it faster"
                self._refuse(BodyTimeoutError(message))

        timer = loop.call_later(times.body_seconds, look)
        try:
            await self._waiter
        finally:
            timer.cancel()

    def _refuse(self, refusal: RequestError) -> None:
        self._refusal = refusal
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the request body is larger than {self._max_bytes} bytes, the most this router takes")


Result = TypeVar("Result")

SMALL_BYTES = 256 * 2**10
_NUM_MIDDLE = 4  # between small and large, worked on at once
_AT_ONCE = contextlib.nullcontext()
LOOP_BYTES = 4 * 2**20
"""Up to here a body is read on the event loop, in at most 18 ms. One of 64 MiB takes 0.2 to 0.5 s; read in a
thread, it lets the loop run every 0.13 s at least: a long string is decoded in one call.
"""


class LargeBodies:
    """Up to `loop_bytes` a body is read on the event loop."""

    def __init__(self, loop_bytes: int = LOOP_BYTES) -> None:
        self._loop_bytes = loop_bytes
        self._reading = asyncio.Lock()
        self._middle = asyncio.Semaphore(_NUM_MIDDLE)
        self._large = asyncio.Lock()

    def turn(self, num_bytes: int) -> contextlib.AbstractAsyncContextManager[None]:
        """To be held while a body is worked on."""
        if num_bytes <= SMALL_BYTES:
            return _AT_ONCE
        return self._middle if num_bytes <= self._loop_bytes else self._large

    async def read(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        if num_bytes <= self._loop_bytes:
            return work()
        async with self._reading:
            reading = asyncio.get_running_loop().run_in_executor(None, work)
            is_cancelled = False
            while not reading.done():
                try:
                    await asyncio.wait([reading])
                except asyncio.CancelledError:
                    is_cancelled = True
            if is_cancelled:
                reading.exception()  # nobody is left to be told
                raise asyncio.CancelledError
            return reading.result()
