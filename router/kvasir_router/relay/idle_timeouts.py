"""Times out answers that bring nothing of their body. One timer for all of them: each of uvloop's costs 4 us."""

import asyncio
from typing import Protocol

# How often in the time-out it is looked, and at least how often.
_NUM_LOOKS = 8
_MOST_SECONDS_BETWEEN = 1.0


class Watched(Protocol):
    def idle_since(self, now: float) -> float:
        """`now` where something has come since the last call, or nothing is waited for."""
        ...

    def time_out(self, seconds: float) -> None: ...


class IdleTimeouts:
    """What is idle for longer than `seconds` is timed out, an eighth of that later at most. Close it at the end."""

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._seconds = seconds
        self._seconds_between = min(seconds / _NUM_LOOKS, _MOST_SECONDS_BETWEEN)
        self._loop = loop
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, one: Watched) -> None:
        self._watched.add(one)
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds_between, self._look)

    def forget(self, one: Watched) -> None:
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
