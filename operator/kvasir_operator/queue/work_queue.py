"""The work queue: de-duplicated keys, one pass per key at a time, back-off per key, delayed re-adds.

The asyncio shell of schedule.py, on which workers wait.
"""

import asyncio
from collections.abc import Callable

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.queue.back_off import BackOff
from kvasir_operator.queue.schedule import KeySchedule


class WorkQueue:
    """Hands due keys to workers. Made for one event loop; `close` lets the workers end after their current pass."""

    def __init__(
        self, clock: Callable[[], float], back_off: BackOff | None = None, spacing_seconds: float = 0.5
    ) -> None:
        self._clock = clock
        self._schedule = KeySchedule(back_off or BackOff(), spacing_seconds)
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, key: ServiceKey, delay_seconds: float = 0.0, is_urgent: bool = False) -> None:
        self._schedule.add(key, self._clock() + delay_seconds, is_urgent)
        self._changed.set()

    async def get(self) -> ServiceKey | None:
        """The next due key, waiting for one; None once the queue is closed. Answer with done, failed or forget."""
        while not self._closed:
            key = self._schedule.take(self._clock())
            if key is not None:
                self._changed.set()  # another worker may find the next key due
                return key
            self._changed.clear()
            await self._wait()
        return None

    def done(self, key: ServiceKey) -> None:
        self._schedule.finish(key, self._clock())
        self._changed.set()

    def failed(self, key: ServiceKey) -> float:
        """Returns the back-off in seconds."""
        delay = self._schedule.fail(key, self._clock())
        self._changed.set()
        return delay

    def forget(self, key: ServiceKey) -> None:
        """Ends the pass of a key whose service is gone."""
        self._schedule.finish(key, self._clock())
        self._schedule.forget(key)
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def has_urgent(self) -> bool:
        """Whether an urgent key waits for a worker."""
        return self._schedule.has_urgent(self._clock())

    @property
    def depth(self) -> int:
        return self._schedule.num_due(self._clock())

    @property
    def longest_wait_seconds(self) -> float:
        return self._schedule.longest_wait_seconds(self._clock())

    async def _wait(self) -> None:
        start = self._schedule.next_start()
        timeout = None if start is None else max(0.0, start - self._clock())
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return
