"""Finish time: the endpoint that would finish this request's prefill first, as one cost in seconds.

cost = (uncached tokens in flight + this request's) / prefill rate + decode load + a barrier as the KV cache fills.
Mooncake's conductor (Qin et al., arXiv 2407.00079) is the source of the idea; the terms and their weights are ours.
"""

from kvasir_router.endpoints.endpoint import EndpointView, Snapshot
from kvasir_router.request import InferenceRequest

# A token resident in a decode batch is read once a step; a token of prefill goes through every weight once. The ratio
# only has to tell an empty endpoint from a busy one when their prefill queues are equal.
DECODE_WEIGHT = 0.05
# The barrier starts here: 0 s, then 0.5 s at 90 %, 1.5 s at 95 %, 20 s when full, where requests would be preempted.
KV_BARRIER_START = 0.8
KV_BARRIER_SECONDS = 0.5
_FULL = 0.995


class FinishTime:
    """Costs within `tie_tolerance` of the lowest are ties (rates are measured, so noisy); the longest idle wins."""

    def __init__(self, tie_tolerance: float = 0.02) -> None:
        self._tie_tolerance = tie_tolerance

    def pick(self, request: InferenceRequest, snapshot: Snapshot) -> EndpointView:
        costs = [cost_seconds(request, endpoint) for endpoint in snapshot.endpoints]
        limit = min(costs) * (1 + self._tie_tolerance)
        ties = [endpoint for endpoint, cost in zip(snapshot.endpoints, costs, strict=True) if cost <= limit]
        return min(ties, key=lambda endpoint: (endpoint.last_dispatch, endpoint.url))


def cost_seconds(request: InferenceRequest, endpoint: EndpointView) -> float:
    """Expected seconds until the endpoint has prefilled this request, plus what its load adds."""
    uncached_tokens = max(request.num_prompt_tokens - endpoint.cached_tokens, 1)
    prefill = (endpoint.prefill_tokens + uncached_tokens) / endpoint.prefill_rate
    decode = DECODE_WEIGHT * endpoint.resident_tokens / endpoint.prefill_rate
    return prefill + decode + kv_barrier_seconds(_kv_usage_with(request, endpoint))


def kv_barrier_seconds(usage: float) -> float:
    """0 up to KV_BARRIER_START, then rising without a jump and steeply towards a full cache."""
    excess = usage - KV_BARRIER_START
    if excess <= 0:
        return 0.0
    return KV_BARRIER_SECONDS * excess / (1 - min(usage, _FULL))


def _kv_usage_with(request: InferenceRequest, endpoint: EndpointView) -> float:
    """Share of KV in use once the request is there: the larger of what was scraped and what we know is in flight."""
    if endpoint.kv_capacity_tokens is None:
        return endpoint.kv_usage or 0.0
    own = endpoint.resident_tokens / endpoint.kv_capacity_tokens
    added = request.num_resident_tokens / endpoint.kv_capacity_tokens
    return max(own, endpoint.kv_usage or 0.0) + added
