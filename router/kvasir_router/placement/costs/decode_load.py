"""What running decodes take of each step: the KV that they read, for this request's prefill and for its own decode."""

from collections.abc import Mapping, Sequence

from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

# A token resident in a decode batch is read once a step; a token of prefill goes through every weight once. The ratio
# only has to tell an empty endpoint from a busy one when their prefill queues are equal.
DECODE_WEIGHT = 0.05


def seconds(
    request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
) -> list[float]:
    return [
        DECODE_WEIGHT * load.resident_tokens / load.prefill.tokens_per_second for load in [e.load for e in endpoints]
    ]
