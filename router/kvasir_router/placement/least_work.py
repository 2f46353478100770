"""Least work: the endpoint that could begin soonest, whatever is cached where. For prompts that share nothing."""

from collections.abc import Mapping, Sequence

from kvasir_router.placement.placement import Placement, leg_on
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint


class LeastWork:
    """Of equals, as idle ones are, that with the fewest tokens in decode; then the one idle longest."""

    def place(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
    ) -> Placement:
        choice = min(endpoints, key=lambda endpoint: _order(endpoint, now))
        return Placement(leg_on(choice, request, cached))


def _order(endpoint: Endpoint, now: float) -> tuple[float, int, int, str]:
    load = endpoint.load
    return max(load.queue_seconds(now), 0.0), load.resident_tokens, load.last_dispatch, endpoint.url
