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


class Flow(Protocol):
    """The connection that the answer comes by, as long as it comes."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class UpstreamAnswer:
    """`idle_seconds` is the longest time without a byte of the body, the time until the first one included.

    `status` and `headers`, names in lower case and values as they came, hold once it has begun.
    """

    def __init__(self, url: str, flow: Flow, idle_seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_whole = False
        self._flow = flow
        self._loop = loop
        self._held: list[bytes] = []
        self._num_held_bytes = 0
        self._write: Callable[[bytes], None] | None = None
        self._is_paused = False  # by its reader
        self._error: RouterError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._idle_seconds = idle_seconds
        self._last_heard = loop.time()
        self._idle_timer = loop.call_later(idle_seconds, self._check_idle)

    # For whoever has asked

    async def begin(self) -> None:
        """Until the first bytes of the body are there, or its end. Raises UpstreamError, RequestTimeoutError."""
        while not self._held and not self.is_whole:
            await self._change()

    async def relay(self, write: Callable[[bytes], None]) -> None:
        """Gives `write` the body, all that has come at a time, and returns at its end.

        Raises UpstreamError, RequestTimeoutError; what has come before is written.
        """
        held, self._held = b"".join(self._held), []
        self._write = write
        if held:
            write(held)
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
        self._last_heard = self._loop.time()
        if not self.is_whole:
            self._flow.resume_reading()

    def close(self) -> None:
        """No more is written. May be repeated."""
        self._idle_timer.cancel()
        self._write = None
        if not self.is_whole:
            self._flow.abort()

    # For the connection

    def feed(self, body: bytes) -> None:
        self._last_heard = self._loop.time()
        if self._write is not None:
            self._write(body)
            return
        self._held.append(body)
        self._num_held_bytes += len(body)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self._flow.pause_reading()
        self._wake()

    def end(self) -> None:
        self.is_whole = True
        self._idle_timer.cancel()
        self._wake()

    def fail(self, error: RouterError) -> None:
        """Only the first counts."""
        self._error = self._error or error
        self._idle_timer.cancel()
        self._wake()

    async def _change(self) -> None:
        if self._error is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        else:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_idle(self) -> None:
        """One timer an answer, not one a chunk: it looks again when the time since the last chunk will be over."""
        now = self._loop.time()
        idle_since = now if self._is_paused else self._last_heard
        seconds_left = idle_since + self._idle_seconds - now
        if seconds_left > 0:
            self._idle_timer = self._loop.call_later(seconds_left, self._check_idle)
        else:
            self.fail(RequestTimeoutError(f"{self.url} has sent nothing for {self._idle_seconds:g} s"))
