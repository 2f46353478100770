"""Policies that compare no costs."""

from collections.abc import Sequence
from math import ceil

from xxhash import xxh3_64_intdigest

from kvasir_router.placement.placement import Placement, leg_on
from kvasir_router.prefix_index.index import Cached
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

# An endpoint may have so many times the mean of requests in flight, this one included.
_LOAD_BOUND = 1.25


class RoundRobin:
    """Round robin: the endpoint that has waited longest for a request. No state of its own: loads tell."""

    def place(self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> Placement:
        choice = min(endpoints, key=lambda endpoint: (endpoint.load.last_dispatch, endpoint.url))
        return Placement(leg_on(choice, request, cached))


class SessionAffinity:
    """Requests of one session go to one endpoint, by rendezvous hashing (Thaler and Ravishankar 1998).

    Every router chooses the same without a word between them, and an endpoint that comes or goes moves only its own
    sessions. Loads are bounded (Mirrokni et al., arXiv 1608.01350): a session leaves its endpoint for the next in its
    order while that one has too many requests.

    A request without a session goes where the fewest are in flight.
    """

    def place(self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> Placement:
        num_in_flight = sum(endpoint.load.num_in_flight for endpoint in endpoints)
        limit = ceil(_LOAD_BOUND * (num_in_flight + 1) / len(endpoints))
        open_ones = [endpoint for endpoint in endpoints if endpoint.load.num_in_flight < limit]
        if request.session is None:
            choice = min(open_ones, key=lambda endpoint: (endpoint.load.num_in_flight, endpoint.load.last_dispatch))
        else:
            session = request.session.encode()
            choice = max(open_ones, key=lambda endpoint: _affinity(session, endpoint.url))
        return Placement(leg_on(choice, request, cached))


def _affinity(session: bytes, url: str) -> int:
    return xxh3_64_intdigest(url.encode(), seed=xxh3_64_intdigest(session))
