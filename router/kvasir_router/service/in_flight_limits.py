"""How many requests each endpoint of a service may have in flight now, and outlier ejection, which decides for some.

As many as configured; fewer while it is new; one while it is tried again after errors, and none while it is ejected.
Those that only prefill are compared with one another, and so are all others: what they have in flight differs. All that
only prefill may be out, since those that decode can do it. Everything else asks the endpoint whether it has room, and
knows nothing of reasons.

Out goes who fails several times in a row, or clearly more often than the others, but never more than half of those
that answer clients: an error that all of them give is the requests' or the model's, and somebody must still answer. An
endpoint whose last answer was an error is a suspect for a while and used where there is no other, so that one that
fails fast does not look idle, and best. Its circuit is open for a while once it has tripped, then half-open: it lets
one request at a time through; some that succeed close it, the first that fails opens it again for twice as long.
"""

import logging
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir_router.service.registry import Endpoint, EndpointState, Registry

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


_ERRORS_IN_A_ROW = 5
# Errors against the share of all others, once there are enough answers to tell.
_SHARE_ABOVE_OTHERS = 0.4
_MIN_ANSWERS = 10.0
_MEMORY_SECONDS = 20.0
"""Of answers that count in a share."""
SUSPECT_SECONDS = 1.0  # after the first error, and twice as long after each further one


class FadingCount:
    """Of what has happened lately: what is `memory_seconds` old counts 1/e."""

    def __init__(self, memory_seconds: float) -> None:
        self._memory_seconds = memory_seconds
        self._number = 0.0
        self._counted_at = 0.0

    def at(self, now: float) -> float:
        return self._number * math.exp((self._counted_at - now) / self._memory_seconds)

    def add(self, number: float, now: float) -> None:
        self._number, self._counted_at = self.at(now) + number, now


class ErrorShare:
    """Of an endpoint's recent answers those that were errors."""

    def __init__(self) -> None:
        self.answers = FadingCount(_MEMORY_SECONDS)
        self.errors = FadingCount(_MEMORY_SECONDS)

    def count(self, *, is_error: bool, now: float) -> None:
        self.answers.add(1, now)
        self.errors.add(is_error, now)


@dataclass(slots=True)
class _Record:
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    share: ErrorShare = field(default_factory=ErrorShare)
    num_errors_in_a_row: int = 0
    suspect_until: float = 0.0


class Ejection:
    """By url. Methods that may change what `max_in_flight` says tell whether they have. `may_eject_all`: where none is
    left, others do what these do.
    """

    def __init__(self, *, may_eject_all: bool = False) -> None:
        self._may_eject_all = may_eject_all
        self._records: dict[str, _Record] = {}

    def follow(self, urls: Set[str]) -> None:
        """These endpoints are ready; what is known of others is forgotten, so that whoever comes back starts afresh.

        Where so many have gone that of the rest more are out than may be, the longest out come back.
        """
        self._records = {url: self._records.get(url) or _Record() for url in urls}
        out = [record for record in self._records.values() if record.breaker.state is not CircuitState.CLOSED]
        out.sort(key=lambda record: record.breaker.tripped_at, reverse=True)
        for record in out[self._most_out :]:
            record.breaker.close()

    def succeeded(self, url: str, now: float) -> bool:
        record = self._records.get(url)
        if record is None:
            return False
        record.share.count(is_error=False, now=now)
        record.num_errors_in_a_row, record.suspect_until = 0, 0.0
        if not record.breaker.succeeded():
            return False
        record.share = ErrorShare()  # its past has been punished
        return True

    def failed(self, url: str, now: float) -> bool:
        record = self._records.get(url)
        if record is None:
            return False
        record.share.count(is_error=True, now=now)
        record.suspect_until = now + SUSPECT_SECONDS * 2 ** min(record.num_errors_in_a_row, _ERRORS_IN_A_ROW)
        record.num_errors_in_a_row += 1
        if record.breaker.state is not CircuitState.CLOSED:
            return record.breaker.failed(now)
        if not self._is_outlier(url, record, now) or self.num_ejected >= self._most_out:
            return False
        record.breaker.trip(now)
        return True

    def busy(self, url: str, until: float) -> None:
        """It takes no requests until then, by its own word."""
        record = self._records.get(url)
        if record is not None:
            record.suspect_until = max(record.suspect_until, until)

    def advance(self, now: float) -> bool:
        """To be called now and then: ejections end."""
        have_ended = [record.breaker.advance(now) for record in self._records.values()]
        return any(have_ended)

    def max_in_flight(self, url: str) -> int | None:
        """0 while it is ejected, 1 while it is tried again; None: no limit."""
        record = self._records.get(url)
        return None if record is None else record.breaker.max_in_flight

    def state(self, url: str) -> CircuitState:
        record = self._records.get(url)
        return CircuitState.CLOSED if record is None else record.breaker.state

    def suspect_until(self, url: str) -> float:
        """Until then it is used where there is no other."""
        record = self._records.get(url)
        return 0.0 if record is None else record.suspect_until

    @property
    def num_ejected(self) -> int:
        return sum(record.breaker.state is not CircuitState.CLOSED for record in self._records.values())

    @property
    def _most_out(self) -> int:
        return len(self._records) if self._may_eject_all else len(self._records) // 2

    def _is_outlier(self, url: str, record: _Record, now: float) -> bool:
        return record.num_errors_in_a_row >= _ERRORS_IN_A_ROW or self._fails_more_than_others(url, record, now)

    def _fails_more_than_others(self, url: str, record: _Record, now: float) -> bool:
        num_answers = record.share.answers.at(now)
        if num_answers < _MIN_ANSWERS:
            return False
        others = [other.share for other_url, other in self._records.items() if other_url != url]
        num_of_others = sum(share.answers.at(now) for share in others)
        share_of_others = sum(share.errors.at(now) for share in others) / num_of_others if num_of_others else 0.0
        return record.share.errors.at(now) / num_answers > share_of_others + _SHARE_ABOVE_OTHERS


logger = logging.getLogger(__name__)
SLOW_START_SECONDS = 10.0


class InFlightLimits:
    """`on_room` is called when an endpoint may have more than before; `clock` counts seconds."""

    def __init__(
        self, registry: Registry, max_in_flight: int, clock: Callable[[], float], on_room: Callable[[], None]
    ) -> None:
        self._registry = registry
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._on_room = on_room
        self._ejections = {
            takes_requests: Ejection(may_eject_all=not takes_requests) for takes_requests in (True, False)
        }
        self._ready_since: dict[str, float] = {}  # by url

    def answered(self, url: str, *, is_error: bool) -> None:
        """An endpoint has begun its answer, or an attempt there has failed."""
        now = self._clock()
        ejection = self._ejection_of(url)
        has_changed = (ejection.failed if is_error else ejection.succeeded)(url, now)
        self._mark(url)
        if has_changed:
            logger.warning("endpoint %s: circuit %s", url, ejection.state(url))
            self._apply(now)

    def busy(self, url: str, seconds: float = SUSPECT_SECONDS) -> None:
        """An endpoint has sent a request away for so long, which is no error."""
        self._ejection_of(url).busy(url, self._clock() + seconds)
        self._mark(url)

    def refresh(self) -> None:
        """To be called about every second, and when endpoints come, go or change their state."""
        now = self._clock()
        ready = [endpoint for endpoint in self._registry if endpoint.state is EndpointState.READY]
        self._ready_since = {endpoint.url: self._ready_since.get(endpoint.url, now) for endpoint in ready}
        for takes_requests, ejection in self._ejections.items():
            ejection.follow({each.url for each in ready if each.role.takes_requests is takes_requests})
            ejection.advance(now)
        self._apply(now)

    def circuit(self, url: str) -> CircuitState:
        return self._ejection_of(url).state(url)

    @property
    def num_ejected(self) -> int:
        return sum(ejection.num_ejected for ejection in self._ejections.values())

    def _ejection_of(self, url: str) -> Ejection:
        endpoint = self._registry.get(url)
        return self._ejections[endpoint is None or endpoint.role.takes_requests]

    def _mark(self, url: str) -> None:
        endpoint = self._registry.get(url)
        if endpoint is not None:
            endpoint.suspect_until = self._ejection_of(url).suspect_until(url)

    def _apply(self, now: float) -> None:
        has_room = False
        elsewhere = {kind: self._in_flight_of_established(kind, now) for kind in self._ejections}
        for endpoint in self._registry:
            limit = self._limit(endpoint, elsewhere[endpoint.role.takes_requests], now)
            has_room = has_room or limit > endpoint.load.max_in_flight
            endpoint.load.max_in_flight = limit
        if has_room:
            self._on_room()

    def _limit(self, endpoint: Endpoint, elsewhere: list[int], now: float) -> int:
        seconds_ready = now - self._ready_since.get(endpoint.url, now)
        ejection = self._ejections[endpoint.role.takes_requests]
        limits = (ejection.max_in_flight(endpoint.url), newcomers_limit(seconds_ready, elsewhere))
        return min([self._max_in_flight, *(limit for limit in limits if limit is not None)])

    def _in_flight_of_established(self, takes_requests: bool, now: float) -> list[int]:
        return [
            endpoint.load.num_in_flight
            for endpoint in self._registry
            if endpoint.role.takes_requests is takes_requests
            and now - self._ready_since.get(endpoint.url, now) >= SLOW_START_SECONDS
        ]


def newcomers_limit(seconds_ready: float, in_flight_elsewhere: Sequence[int]) -> int | None:
    """A part of what the others have on average, which grows with time; None: no limit. A newcomer's caches are cold,
    and idle as it is, it would draw every request at once.

    `in_flight_elsewhere`: requests of each endpoint that is no newcomer. Where all are new, somebody must do the work.
    """
    if seconds_ready >= SLOW_START_SECONDS or not in_flight_elsewhere:
        return None
    mean = sum(in_flight_elsewhere) / len(in_flight_elsewhere)
    return 1 + math.floor(mean * max(seconds_ready, 0.0) / SLOW_START_SECONDS)
