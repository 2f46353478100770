"""Which service is reconciled next, and when: decided from times that are passed in; no clock is read here.

A key that is added while its pass runs gets one more pass afterwards, never two at once.
"""

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.queue.back_off import BackOff


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
