"""How many requests each endpoint of a service may have in flight now.

As many as configured; fewer while it is new; one while it is tried again after errors, and none while it is ejected.
Those that only prefill are compared with one another, and so are all others: what they have in flight differs. All that
only prefill may be out, since those that decode can do it. Everything else asks the endpoint whether it has room, and
knows nothing of reasons.
"""

import logging
import math
from collections.abc import Callable, Sequence

from kvasir_router.service.circuit_breaker import CircuitState
from kvasir_router.service.ejection import SUSPECT_SECONDS, Ejection
from kvasir_router.service.registry import Endpoint, EndpointState, Registry

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
