"""Power of two choices (Mitzenmacher 2001): of two endpoints drawn at random the one with fewer requests in flight.

Many routers that know little of one another do not all choose the same endpoint.
"""

from collections.abc import Mapping, Sequence
from random import Random

from kvasir_router.placement.placement import Placement, leg_on
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint


class PowerOfTwo:
    """`seed` None: each router draws its own."""

    def __init__(self, seed: int | None = None) -> None:
        self._source = Random(seed)

    def place(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
    ) -> Placement:
        drawn = self._source.sample(endpoints, min(2, len(endpoints)))
        choice = min(drawn, key=lambda endpoint: endpoint.load.num_in_flight)
        return Placement(leg_on(choice, request, cached))
