"""One endpoint's circuit breaker: closed, open for a while once it has tripped, then half-open for trials.

Half-open lets one request at a time through; some that succeed close it, the first that fails opens it again for twice
as long. Who trips it, and why, is the ejection's business. Reads no clock.
"""

from enum import StrEnum

_OPEN_SECONDS = 5.0
_MAX_OPEN_SECONDS = 60.0
_TRIALS_TO_CLOSE = 2
# After this long without a trip the next one counts as the first again.
_FORGIVEN_SECONDS = 120.0


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    def __init__(self) -> None:
        self.state = CircuitState.CLOSED
        self._num_trips = 0  # without a long time of peace between them
        self.tripped_at = 0.0
        self._open_until = 0.0
        self._num_trials_succeeded = 0

    @property
    def max_in_flight(self) -> int | None:
        """Requests that the endpoint may have at once; None: as many as ever."""
        match self.state:
            case CircuitState.CLOSED:
                return None
            case CircuitState.HALF_OPEN:
                return 1
        return 0

    def trip(self, now: float) -> None:
        if now - self._open_until > _FORGIVEN_SECONDS:
            self._num_trips = 0
        self.state = CircuitState.OPEN
        self.tripped_at = now
        self._open_until = now + min(_OPEN_SECONDS * 2**self._num_trips, _MAX_OPEN_SECONDS)
        self._num_trips += 1

    def close(self) -> None:
        self.state = CircuitState.CLOSED

    def advance(self, now: float) -> bool:
        """To be called now and then. Whether it has just become half-open."""
        if self.state is not CircuitState.OPEN or now < self._open_until:
            return False
        self.state = CircuitState.HALF_OPEN
        self._num_trials_succeeded = 0
        return True

    def succeeded(self) -> bool:
        """A request was answered. Whether that has closed the breaker."""
        if self.state is not CircuitState.HALF_OPEN:
            return False
        self._num_trials_succeeded += 1
        if self._num_trials_succeeded < _TRIALS_TO_CLOSE:
            return False
        self.close()
        return True

    def failed(self, now: float) -> bool:
        """A request failed. Whether that has opened the breaker again; a closed one is tripped from outside."""
        if self.state is not CircuitState.HALF_OPEN:
            return False
        self.trip(now)
        return True
