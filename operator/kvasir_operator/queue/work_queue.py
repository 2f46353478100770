"""The work queue: de-duplicated keys, one pass per key at a time, back-off per key, delayed re-adds.

The asyncio shell of schedule.py, on which workers wait. One of them at a time waits for a key, and is woken when one is
due: an event of a child comes every few milliseconds in a burst, and wants a pass in seconds.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

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
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._waits_until = -math.inf
        """When the worker whose turn it is looks again; before that where a key is due earlier."""
        self._closed = False

    def add(self, key: ServiceKey, delay_seconds: float = 0.0, is_urgent: bool = False) -> None:
        self._schedule.add(key, self._clock() + delay_seconds, is_urgent)
        self._changed(key)

    def debounce(self, key: ServiceKey, quiet_seconds: float) -> None:
        """A pass once nobody has asked so for as long, or for three times as long anyway; at once where that is 0."""
        now = self._clock()
        if quiet_seconds:
            self._schedule.debounce(key, now + quiet_seconds, now + _LONGEST_DEBOUNCE * quiet_seconds)
        else:
            self._schedule.add(key, now)
        self._changed(key)

    async def get(self) -> ServiceKey | None:
        """The next due key, waiting for one; None once the queue is closed. Answer with done, failed or forget."""
        async with self._turn:
            while not self._closed:
                key = self._schedule.take(self._clock())
                if key is not None:
                    return key
                await self._until_due()
        return None

    def done(self, key: ServiceKey) -> None:
        self._schedule.finish(key, self._clock())
        self._changed(key)

    def failed(self, key: ServiceKey) -> float:
        """Returns the back-off in seconds."""
        delay = self._schedule.fail(key, self._clock())
        self._changed(key)
        return delay

    def forget(self, key: ServiceKey) -> None:
        """Ends the pass of a key whose service is gone."""
        self._schedule.finish(key, self._clock())
        self._schedule.forget(key)
        self._changed(key)

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def has_urgent(self, besides: ServiceKey) -> bool:
        """Whether another urgent key waits for a worker, or has its pass."""
        return self._schedule.has_urgent(self._clock(), besides)

    @property
    def depth(self) -> int:
        return self._schedule.num_due(self._clock())

    @property
    def longest_wait_seconds(self) -> float:
        return self._schedule.longest_wait_seconds(self._clock())

    async def _until_due(self) -> None:
        start = self._schedule.next_start()
        self._waits_until = math.inf if start is None else start
        self._wake.clear()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if start is None else max(0.0, start - self._clock())):
                    await self._wake.wait()
        finally:
            self._waits_until = -math.inf

    def _changed(self, key: ServiceKey) -> None:
        start = self._schedule.start_of(key)
        if start is not None and start < self._waits_until:
            self._wake.set()
