"""The work queue: de-duplicated keys, one pass per key at a time, back-off per key, delayed re-adds.

`KeySchedule` decides, given the time, which key is due; it reads no clock. `WorkQueue` is the asyncio shell whose
workers wait on it. A key that is added while its pass runs gets one more pass afterwards, never two at once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvasir_operator.kinds import ServiceKey


@dataclass(frozen=True)
class BackOff:
    """Delays after failures in a row: `first_seconds`, doubled each time, at most `longest_seconds`."""

    first_seconds: float = 0.5
    longest_seconds: float = 300.0

    def delay_seconds(self, num_failures: int) -> float:
        doublings = min(num_failures - 1, 32)
        return min(self.first_seconds * 2.0**doublings, self.longest_seconds)


class KeySchedule:
    """When each key is due. All times are seconds of one monotonic clock, passed in by the caller."""

    def __init__(self, back_off: BackOff, spacing_seconds: float) -> None:
        self._back_off = back_off
        self._spacing_seconds = spacing_seconds
        self._due: dict[ServiceKey, float] = {}
        self._urgent: set[ServiceKey] = set()
        self._running: dict[ServiceKey, float] = {}
        self._earliest: dict[ServiceKey, float] = {}
        self._num_failures: dict[ServiceKey, int] = {}

    def add(self, key: ServiceKey, due: float, is_urgent: bool = False) -> None:
        """Wants a pass at `due`; an earlier or an urgent wish for the same key stands."""
        self._due[key] = min(due, self._due.get(key, due))
        if is_urgent:
            self._urgent.add(key)

    def take(self, now: float) -> ServiceKey | None:
        """The key that has been due longest, urgent ones first, now marked as running; None when none is due."""
        ready = [key for key in self._due if key not in self._running and self._start(key) <= now]
        if not ready:
            return None
        key = min(ready, key=lambda each: (each not in self._urgent, self._start(each)))
        del self._due[key]
        self._urgent.discard(key)
        self._running[key] = now
        return key

    def finish(self, key: ServiceKey, now: float) -> None:
        """The pass succeeded: the key's failures are forgotten."""
        self._num_failures.pop(key, None)
        self._end(key, now)

    def fail(self, key: ServiceKey, now: float) -> float:
        """The pass failed: the key is due again after its back-off, which is returned in seconds."""
        self._num_failures[key] = self._num_failures.get(key, 0) + 1
        self._end(key, now)
        delay = self._back_off.delay_seconds(self._num_failures[key])
        self.add(key, now + delay)
        return delay

    def forget(self, key: ServiceKey) -> None:
        """Drops what is remembered of a key whose service is gone; a wish made meanwhile stands."""
        self._num_failures.pop(key, None)
        self._earliest.pop(key, None)

    def next_start(self) -> float | None:
        """When the next key may start; None while nothing waits but keys that are running."""
        return min((self._start(key) for key in self._due if key not in self._running), default=None)

    def has_urgent(self, now: float) -> bool:
        """Whether an urgent key waits for a worker."""
        return any(key not in self._running and self._start(key) <= now for key in self._urgent)

    def num_due(self, now: float) -> int:
        return sum(1 for key in self._due if self._start(key) <= now)

    def longest_wait_seconds(self, now: float) -> float:
        """How long the oldest due key has waited for a worker, or the oldest pass has run."""
        waits = [now - self._start(key) for key in self._due if key not in self._running]
        return max([0.0, *waits, *(now - started for started in self._running.values())])

    def _start(self, key: ServiceKey) -> float:
        return max(self._due[key], self._earliest.get(key, 0.0))

    def _end(self, key: ServiceKey, now: float) -> None:
        del self._running[key]
        # A burst of child events becomes one pass.
        self._earliest[key] = now + self._spacing_seconds


class WorkQueue:
    """Hands due keys to workers. Made for one event loop; `close` lets the workers end after their current pass."""

    def __init__(
        self, clock: Callable[[], float], back_off: BackOff | None = None, spacing_seconds: float = 0.2
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
