"""One answer of an engine while it comes: its head, then its body, which goes out again the moment that it arrives.

Until somebody takes the body it is held, a few chunks of it; the rest waits at the engine. Whoever asked closes the
answer, which ends the connection unless the answer was whole: that is how an engine learns that nobody wants more.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvasir_router.errors import RequestTimeoutError, RouterError

MAX_HELD_BYTES = 64 * 1024
"""Of a body that nobody takes yet."""


# How often in the time-out it is looked, and at least how often.
_NUM_LOOKS = 8
_MOST_SECONDS_BETWEEN = 1.0


class IdleTimeouts:
    """Answers that bring nothing of their body for `seconds` are timed out, an eighth of that later at most.

    One timer for all of them: each of uvloop's costs 4 us. Close it at the end.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._seconds = seconds
        self._seconds_between = min(seconds / _NUM_LOOKS, _MOST_SECONDS_BETWEEN)
        self._loop = loop
        self._watched: set[UpstreamAnswer] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, one: "UpstreamAnswer") -> None:
        self._watched.add(one)
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds_between, self._look)

    def forget(self, one: "UpstreamAnswer") -> None:
        """May be repeated."""
        self._watched.discard(one)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Each is timed out once. The next look is certain before any of them, whatever it raises, is."""
        now = self._loop.time()
        self._timer = self._loop.call_later(self._seconds_between, self._look) if self._watched else None
        for one in tuple(self._watched):
            if now - one.idle_since(now) >= self._seconds:
                self._watched.discard(one)
                one.time_out(self._seconds)


class Flow(Protocol):
    """The connection that the answer comes by, as long as it comes."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


def ignore(status: int) -> None:
    """An answer's first byte, by whoever need not know of it."""


class UpstreamAnswer:
    """`idle_timeouts` bound the time without a byte of the body, the time until the first one included.

    `status` and `headers`, names in lower case and values as they came, hold once it has begun.
    """

    def __init__(self, url: str, flow: Flow, idle_timeouts: IdleTimeouts, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_whole = False
        self._flow = flow
        self._loop = loop
        self._held: list[bytes] = []
        self._num_held_bytes = 0
        self._write: Callable[[bytes], None] | None = None
        self._write_chunk: Callable[[bytes], None] | None = None
        self._is_paused = False  # by its reader
        self._error: RouterError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._idle_timeouts = idle_timeouts
        self._idle_since = loop.time()
        self._has_heard = False  # something since it was last looked at
        idle_timeouts.watch(self)

    # For whoever has asked

    async def begin(self) -> None:
        """Until the first bytes of the body are there, or its end. Raises UpstreamError, RequestTimeoutError."""
        while not self._held and not self.is_whole:
            await self._change()

    async def relay(
        self,
        write: Callable[[bytes], None],
        on_first_byte: Callable[[int], None] = ignore,
        write_chunk: Callable[[bytes], None] | None = None,
    ) -> None:
        """Gives `write` the body, all that has come at a time, and returns at its end.

        `on_first_byte` is told the status once what is there already is written. `write_chunk`, where there is one, is
        given whole chunks in the place of `write`, framed as they came. Raises UpstreamError, RequestTimeoutError;
        what has come before is written.
        """
        held, self._held = b"".join(self._held), []
        self._write, self._write_chunk = write, write_chunk
        if held:
            write(held)
        del held  # it may be long until the end
        on_first_byte(self.status)
        if not self._is_paused:
            self.resume()
        while not self.is_whole:
            await self._change()

    def pause(self) -> None:
        """Its reader has enough for now: the engine waits."""
        self._is_paused = True
        if not self.is_whole:
            self._flow.pause_reading()

    def resume(self) -> None:
        self._is_paused = False
        self._has_heard = True
        if not self.is_whole:
            self._flow.resume_reading()

    def close(self) -> None:
        """No more is written. May be repeated."""
        self._idle_timeouts.forget(self)
        self._write = self._write_chunk = None
        if not self.is_whole:
            self._flow.abort()

    # For the connection

    def feed(self, body: bytes) -> None:
        self._has_heard = True
        if self._write is not None:
            self._write(body)
            return
        self._held.append(body)
        self._num_held_bytes += len(body)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self._flow.pause_reading()
        self._wake()

    def feed_chunk(self, chunk: bytes, begin: int) -> None:
        """With its framing; the body begins at `begin`."""
        if self._write_chunk is None:
            self.feed(chunk[begin:-2])
        else:
            self._has_heard = True
            self._write_chunk(chunk)

    def end(self) -> None:
        self.is_whole = True
        self._wake()

    def fail(self, error: RouterError) -> None:
        """Only the first counts."""
        self._error = self._error or error
        self._wake()

    # For the idle time-out

    def idle_since(self, now: float) -> float:
        if self._has_heard or self._is_paused or self.is_whole:
            self._has_heard, self._idle_since = False, now
        return self._idle_since

    def time_out(self, seconds: float) -> None:
        self.fail(RequestTimeoutError(f"{self.url} has sent nothing for {seconds:g} s"))

    async def _change(self) -> None:
        if self._error is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        else:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
