"""What this request's prefill costs those behind it: nothing where some endpoint is idle, more the longer all are busy.

While every endpoint has a queue, work that is done twice delays everybody until the queues have drained. So the longer
the shortest queue, the more a cached prefix is worth. It is the one term that looks beyond the request itself. Only
what is more than the least counts: the rest is the same wherever it goes.
"""

from collections.abc import Mapping, Sequence

from kvasir_router.placement.costs import own_prefill, prefill_queue
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

# Seconds of others for each second of own prefill: so many for each second of the shortest queue, up to the most.
DELAY_PER_QUEUE_SECOND = 32.0
MOST_DELAY = 32.0


def seconds(
    request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
) -> list[float]:
    shortest = min(prefill_queue.seconds(request, endpoints, cached, now))
    if shortest <= 0:
        return [0.0] * len(endpoints)
    weight = min(DELAY_PER_QUEUE_SECOND * shortest, MOST_DELAY)
    own = own_prefill.seconds(request, endpoints, cached, now)
    least = min(own)
    return [weight * (each - least) for each in own]
