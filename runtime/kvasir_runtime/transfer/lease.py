"""Until when something is kept for another engine that may have gone. Times are seconds of one monotonic clock."""


class Leases:
    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._deadlines: dict[str, float] = {}

    def begin(self, key: str, now: float) -> None:
        self._deadlines[key] = now + self.lease_seconds

    def renew(self, key: str, now: float) -> None:
        """Of one that has begun; what is not leased yet cannot expire either."""
        if key in self._deadlines:
            self.begin(key, now)

    def end(self, key: str) -> None:
        self._deadlines.pop(key, None)

    def expired(self, now: float) -> list[str]:
        """Keys whose time is over; they are forgotten."""
        over = [key for key, deadline in self._deadlines.items() if deadline <= now]
        for key in over:
            del self._deadlines[key]
        return over

    def next_deadline(self) -> float | None:
        return min(self._deadlines.values(), default=None)
