"""Round robin: the endpoint that has waited longest for a request. No state of its own: the snapshot tells."""

from kvasir_router.endpoints.endpoint import EndpointView, Snapshot
from kvasir_router.request import InferenceRequest


class RoundRobin:
    def pick(self, request: InferenceRequest, snapshot: Snapshot) -> EndpointView:
        return min(snapshot.endpoints, key=lambda endpoint: (endpoint.last_dispatch, endpoint.url))
