"""The work queue: de-duplicated keys, one pass per key at a time, back-off per key, delayed re-adds.

The asyncio shell of schedule.py, on which workers wait. One of them is woken at a time, when a key is due: an event of
a child comes every few milliseconds in a burst, and wants a pass in seconds.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.queue.schedule import KeySchedule

_LONGEST_DEBOUNCE = 3
"""In times that it is to be quiet for."""


class WorkQueue:
    """Hands due keys to workers. Made for one event loop; `close` lets the workers end after their current pass."""

    def __init__(self, clock: Callable[[], float], schedule: KeySchedule | None = None) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._schedule = schedule or KeySchedule()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._is_waking = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closed = False

    def add(self, key: ServiceKey, delay_seconds: float = 0.0, is_urgent: bool = False) -> None:
        self._schedule.add(key, self._clock() + delay_seconds, is_urgent)
        self._wake_at(self._schedule.start_of(key))

    def debounce(self, key: ServiceKey, quiet_seconds: float) -> None:
        """A pass once nobody has asked so for as long, or for three times as long anyway; at once where that is 0."""
        now = self._clock()
        if quiet_seconds:
            self._schedule.debounce(key, now + quiet_seconds, now + _LONGEST_DEBOUNCE * quiet_seconds)
        else:
            self._schedule.add(key, now)
        self._wake_at(self._schedule.start_of(key))

    async def get(self) -> ServiceKey | None:
        """The next due key, waiting for one; None once the queue is closed. Answer with done, failed or forget."""
        while not self._closed:
            key = self._schedule.take(self._clock())
            if key is not None:
                self._wake_at_next()  # another worker may find the next key due
                return key
            await self._wait()
        return None

    def done(self, key: ServiceKey) -> None:
        self._schedule.finish(key, self._clock())
        self._wake_at(self._schedule.start_of(key))

    def failed(self, key: ServiceKey) -> float:
        """Returns the back-off in seconds."""
        delay = self._schedule.fail(key, self._clock())
        self._wake_at(self._schedule.start_of(key))
        return delay

    def forget(self, key: ServiceKey) -> None:
        """Ends the pass of a key whose service is gone."""
        self._schedule.finish(key, self._clock())
        self._schedule.forget(key)
        self._wake_at(self._schedule.start_of(key))

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for turn in self._idle:
            if not turn.done():
                turn.set_result(None)

    def has_urgent(self, besides: ServiceKey) -> bool:
        """Whether another urgent key waits for a worker, or has its pass."""
        return self._schedule.has_urgent(self._clock(), besides)

    @property
    def depth(self) -> int:
        return self._schedule.num_due(self._clock())

    @property
    def longest_wait_seconds(self) -> float:
        return self._schedule.longest_wait_seconds(self._clock())

    async def _wait(self) -> None:
        """Until it is this worker's turn to look for a key."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(turn)
        self._wake_at_next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this one's turn: another takes it
                self._is_waking = False
                self._wake_at_next()
            raise
        self._is_waking = False

    def _wake_at_next(self) -> None:
        """All keys are looked through for it: not while every worker has its pass."""
        if self._idle and not self._is_waking:
            self._wake_at(self._schedule.next_start())

    def _wake_at(self, start: float | None) -> None:
        """Wakes a worker when a key may start, unless one is about to look, or will be before."""
        if start is None or self._is_waking or not self._idle or self._closed:
            return
        if self._timer is not None:
            if self._timer_at <= start:
                return
            self._timer.cancel()
            self._timer = None
        delay = start - self._clock()
        if delay > 0:
            self._timer, self._timer_at = asyncio.get_running_loop().call_later(delay, self._ring), start
            return
        while self._idle and not self._is_waking:
            turn = self._idle.popleft()
            if not turn.done():
                turn.set_result(None)
                self._is_waking = True

    def _ring(self) -> None:
        self._timer = None
        self._wake_at_next()
