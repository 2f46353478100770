"""The drain of a server whose clients keep their connections: those that just send a request still get its answer.

A client may send a request on a connection in the moment in which the server closes it, and sees an error. Answers can
announce the end of their connection only while they begin, which streams did long ago. So a server that drains goes on
serving the connections it has for a while, and every answer that now begins says that its connection will be closed.
"""

import asyncio
import contextlib

from kvasir_router.relay.client_times import CLIENT_TIMES


class Drain:
    """Of one server, which tells it of every request."""

    def __init__(self, next_request_seconds: float = CLIENT_TIMES.next_request_seconds) -> None:
        self.is_draining = False
        self._next_request_seconds = next_request_seconds
        self._num_begun = 0
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def begun(self) -> None:
        self._num_begun += 1
        self._num_running += 1
        self._is_idle.clear()

    def ended(self, count: int = 1) -> None:
        """Answered, or given up."""
        self._num_running -= count
        if not self._num_running:
            self._is_idle.set()

    async def finish(self, limit_seconds: float) -> None:
        """Returns once nothing has been asked for a moment, or at the limit; answers may then still be under way."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_seconds):
                while not await self._is_quiet():
                    pass

    async def _is_quiet(self) -> bool:
        await self._is_idle.wait()
        num_begun = self._num_begun
        await asyncio.sleep(self._next_request_seconds)
        return self._is_idle.is_set() and self._num_begun == num_begun
