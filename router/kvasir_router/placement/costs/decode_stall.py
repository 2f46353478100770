"""What this request's prefill costs the requests that decode on the same endpoint: each of their tokens comes later.

Only pairing adds it: where every endpoint does both, it is much the same wherever a prompt goes.
"""

from collections.abc import Mapping, Sequence

from kvasir_router.placement.costs import own_prefill
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

# A second in which a stream that has begun stands still, in seconds of waiting for a first token. Streams are mostly
# read more slowly than they come, so that a pause is felt less than a late beginning.
STALL_WEIGHT = 0.05


def seconds(
    request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
) -> list[float]:
    own = own_prefill.seconds(request, endpoints, cached, now)
    return [STALL_WEIGHT * endpoint.load.num_decoding * each for endpoint, each in zip(endpoints, own, strict=True)]
