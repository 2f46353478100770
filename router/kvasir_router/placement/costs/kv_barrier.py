"""A barrier as the KV cache fills: where it is full, requests wait for others to end, or preempt them.

What a request adds is its uncached tokens and its output. A prefix that it shares is there once for all who use it.
"""

from collections.abc import Mapping, Sequence

from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

# The barrier starts here: 0 s, then 0.5 s at 90 %, 1.5 s at 95 %, 20 s when full.
KV_BARRIER_START = 0.8
KV_BARRIER_SECONDS = 0.5
_FULL = 0.995


def seconds(
    request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
) -> list[float]:
    added = request.num_prompt_tokens + request.num_output_tokens
    return [
        0.0
        if (load := endpoint.load).kv_used_tokens + added <= KV_BARRIER_START * (load.kv_capacity_tokens or 0)
        or (load.kv_usage is None and load.kv_capacity_tokens is None)
        else barrier_seconds(_usage(endpoint, added - cached.get(endpoint.url, 0)))
        for endpoint in endpoints
    ]


def barrier_seconds(usage: float) -> float:
    """0 up to KV_BARRIER_START, then rising without a jump and steeply towards a full cache."""
    excess = usage - KV_BARRIER_START
    if excess <= 0:
        return 0.0
    return KV_BARRIER_SECONDS * excess / (1 - min(usage, _FULL))


def _usage(endpoint: Endpoint, num_added_tokens: int) -> float:
    """Share of KV in use once the request is there."""
    load = endpoint.load
    if load.kv_capacity_tokens is None:
        return load.kv_usage or 0.0
    return (load.kv_used_tokens + max(num_added_tokens, 0)) / load.kv_capacity_tokens
