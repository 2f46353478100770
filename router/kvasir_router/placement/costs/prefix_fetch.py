"""What fetching a prefix from a peer saves of the request's own prefill, less the transfer beyond what is ahead anyway.

Blocks come while the endpoint works on its queue. `own_prefill` stays what it would compute alone, and with it
`delay_to_others`: a prefix held twice takes the place of another, which costs everybody while all have a queue.
"""

from collections.abc import Mapping, Sequence

from kvasir_router.placement.placement import Fetch
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint


class PrefixFetch:
    """`fetches`: what endpoints would fetch, by their urls."""

    def __init__(self, fetches: Mapping[str, Fetch]) -> None:
        self._fetches = fetches

    def __call__(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
    ) -> list[float]:
        return [
            0.0 if (fetch := self._fetches.get(endpoint.url)) is None else -fetch.gained_seconds
            for endpoint in endpoints
        ]
