"""Filter, then the revision whose turn it is, then the policy's pick. No clock, no network.

A request is split by weight once: where it has failed before, it may go wherever it can be served.
"""

from dataclasses import replace

from kvasir_router.endpoints.endpoint import EndpointView, Snapshot
from kvasir_router.policies import Policy
from kvasir_router.request import InferenceRequest
from kvasir_router.traffic_split import TrafficSplit


def candidates(request: InferenceRequest, snapshot: Snapshot) -> tuple[EndpointView, ...]:
    """Endpoints that serve the model and have room; those already tried only when no other is left."""
    fitting = tuple(
        endpoint
        for endpoint in snapshot.endpoints
        if endpoint.num_in_flight < endpoint.max_in_flight
        and (endpoint.models is None or request.model is None or request.model in endpoint.models)
    )
    untried = tuple(endpoint for endpoint in fitting if endpoint.url not in snapshot.avoid)
    return untried or fitting


class Picker:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._split = TrafficSplit()

    def pick(self, request: InferenceRequest, snapshot: Snapshot) -> EndpointView | None:
        """None when no endpoint can take the request now."""
        endpoints = candidates(request, snapshot)
        if not endpoints:
            return None
        if not snapshot.avoid:
            endpoints = self._split.choose(endpoints)
        return self._policy.pick(request, replace(snapshot, endpoints=endpoints))
