"""Which service is reconciled next, and when: decided from times that are passed in; no clock is read here.

A key that is added while its pass runs gets one more pass afterwards, never two at once.
"""

import math

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.queue.back_off import BackOff


class KeySchedule:
    """When each key is due. All times are seconds of one monotonic clock, passed in by the caller."""

    def __init__(self, back_off: BackOff | None = None, spacing_seconds: float = 0.5) -> None:
        """`spacing_seconds`: from the end of a pass to the next one of its key."""
        self._back_off = back_off or BackOff()
        self._spacing_seconds = spacing_seconds
        self._due: dict[ServiceKey, float] = {}
        self._urgent: set[ServiceKey] = set()
        self._rushed: set[ServiceKey] = set()
        self._debounced: dict[ServiceKey, tuple[float, float]] = {}
        """When each is due that waits for more wishes of its kind, and at the latest."""
        self._running: dict[ServiceKey, float] = {}
        self._earliest: dict[ServiceKey, float] = {}
        self._num_failures: dict[ServiceKey, int] = {}

    def add(self, key: ServiceKey, due: float, is_urgent: bool = False) -> None:
        """Wants a pass at `due`; an earlier or an urgent wish for the same key stands."""
        self._due[key] = min(due, self._due.get(key, due))
        if is_urgent:
            self._urgent.add(key)

    def debounce(self, key: ServiceKey, due: float, latest: float) -> None:
        """Wants a pass at `due`, or when a later wish of this kind is, but not after the first one's `latest`."""
        due_before, latest = self._debounced.get(key, (due, latest))
        self._debounced[key] = min(max(due, due_before), latest), latest

    def take(self, now: float) -> ServiceKey | None:
        """The key that has been due longest, urgent ones first, now marked as running; None when none is due."""
        ready = [key for key in self._wanted() if key not in self._running and self._start(key) <= now]
        if not ready:
            return None
        key = min(ready, key=lambda each: (each not in self._urgent, self._start(each)))
        self._due.pop(key, None)
        self._debounced.pop(key, None)
        if key in self._urgent:
            self._urgent.remove(key)
            self._rushed.add(key)
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

    def start_of(self, key: ServiceKey) -> float | None:
        """When the key may start; None while its pass runs, or none is wanted."""
        is_wanted = key in self._due or key in self._debounced
        return self._start(key) if is_wanted and key not in self._running else None

    def next_start(self) -> float | None:
        """When the next key may start; None while nothing waits but keys that are running."""
        return min((self._start(key) for key in self._wanted() if key not in self._running), default=None)

    def has_urgent(self, now: float, besides: ServiceKey) -> bool:
        """Whether another urgent key waits for a worker, or has its pass."""
        is_waiting = any(key not in self._running and self._start(key) <= now for key in self._urgent)
        return is_waiting or bool(self._rushed - {besides})

    def num_due(self, now: float) -> int:
        return sum(1 for key in self._wanted() if self._start(key) <= now)

    def longest_wait_seconds(self, now: float) -> float:
        """How long the oldest due key has waited for a worker, or the oldest pass has run."""
        waits = [now - self._start(key) for key in self._wanted() if key not in self._running]
        return max([0.0, *waits, *(now - started for started in self._running.values())])

    def _wanted(self) -> set[ServiceKey]:
        return self._due.keys() | self._debounced.keys()

    def _start(self, key: ServiceKey) -> float:
        debounced, _ = self._debounced.get(key, (math.inf, math.inf))
        due = min(self._due.get(key, math.inf), debounced)
        return max(due, self._earliest.get(key, 0.0))

    def _end(self, key: ServiceKey, now: float) -> None:
        del self._running[key]
        self._rushed.discard(key)
        # A burst of child events becomes one pass.
        self._earliest[key] = now + self._spacing_seconds
