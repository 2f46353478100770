"""What is ahead: until the engine could begin with this request's prefill."""

from collections.abc import Mapping, Sequence

from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint


def seconds(
    request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
) -> list[float]:
    return [
        left if (left := load.prefill_done_at - now) > load.prefill_rest_seconds else load.prefill_rest_seconds
        for load in [endpoint.load for endpoint in endpoints]
    ]
