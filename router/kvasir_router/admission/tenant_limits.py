"""What one tenant may use of this router process, all its services together. Reads no clock."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator

from kvasir_router.errors import TenantRateLimitError

# Of a token: what rounding may leave missing once the time that `take` has named is over.
_NOTHING = 1e-6


class TokenBucket:
    """Fills steadily, and requests empty it, so that short bursts pass. Full at first, with a minute's tokens."""

    def __init__(self, tokens_per_minute: int, now: float) -> None:
        self._capacity = tokens_per_minute
        self._tokens_per_second = tokens_per_minute / 60
        self._level = float(tokens_per_minute)  # below zero after a request larger than the bucket
        self._filled_at = now

    def take(self, num_tokens: int, now: float) -> float:
        """0.0 where they are taken; else the seconds until they can be, and nothing is taken.

        More than a full bucket holds is taken from a full one, which then fills from below zero: the rate holds.
        """
        self._fill(now)
        missing = min(num_tokens, self._capacity) - self._level
        if missing > _NOTHING:
            return missing / self._tokens_per_second
        self._level -= num_tokens
        return 0.0

    def give_back(self, num_tokens: int) -> None:
        self._level += num_tokens

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._filled_at) * self._tokens_per_second, self._capacity)
        self._filled_at = now


class TenantLimits:
    """None: no limit. `on_room` is called when a tenant that was at its limit in flight may start another request."""

    def __init__(self, tokens_per_minute: int | None, max_in_flight: int | None, on_room: Callable[[], None]) -> None:
        self._tokens_per_minute = tokens_per_minute
        self._max_in_flight = max_in_flight
        self._on_room = on_room
        self._buckets: dict[str, TokenBucket] = {}
        self._num_in_flight: Counter[str] = Counter()

    def charge(self, tenant: str, num_tokens: int, now: float) -> None:
        """The prompt of a request that arrives. Raises TenantRateLimitError (429)."""
        if self._tokens_per_minute is None:
            return
        bucket = self._buckets.setdefault(tenant, TokenBucket(self._tokens_per_minute, now))
        seconds = bucket.take(num_tokens, now)
        if seconds:
            raise TenantRateLimitError(
                f"the tenant {tenant} may send {self._tokens_per_minute} prompt tokens a minute, and this request has "
                f"{num_tokens} more than are left; try again in {math.ceil(seconds)} s",
                retry_after_seconds=math.ceil(seconds),
            )

    def refund(self, tenant: str, num_tokens: int) -> None:
        """For a request that never started."""
        if tenant in self._buckets:
            self._buckets[tenant].give_back(num_tokens)

    def may_start(self, tenant: str) -> bool:
        return self._max_in_flight is None or self._num_in_flight[tenant] < self._max_in_flight

    def num_in_flight(self, tenant: str) -> int:
        return self._num_in_flight[tenant]

    @contextlib.contextmanager
    def in_flight(self, tenant: str) -> Iterator[None]:
        """An attempt of the tenant's is in flight. No limit holds up a stream that goes on elsewhere."""
        self._num_in_flight[tenant] += 1
        try:
            yield
        finally:
            was_at_limit = not self.may_start(tenant)
            self._num_in_flight[tenant] -= 1
            if not self._num_in_flight[tenant]:
                del self._num_in_flight[tenant]
            if was_at_limit and self.may_start(tenant):
                self._on_room()
