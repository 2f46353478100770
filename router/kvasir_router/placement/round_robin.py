"""Round robin: the endpoint that has waited longest for a request. No state of its own: loads tell."""

from collections.abc import Mapping, Sequence

from kvasir_router.placement.placement import Placement, leg_on
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint


class RoundRobin:
    def place(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
    ) -> Placement:
        choice = min(endpoints, key=lambda endpoint: (endpoint.load.last_dispatch, endpoint.url))
        return Placement(leg_on(choice, request, cached))
