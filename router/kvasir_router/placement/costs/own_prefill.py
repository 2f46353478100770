"""The request's own prefill: what of its prompt is not cached there, at the rate measured there."""

from collections.abc import Mapping, Sequence

from kvasir_router.request import InferenceRequest
from kvasir_router.service.prefill_rate import work
from kvasir_router.service.registry import Endpoint


def seconds(
    request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
) -> list[float]:
    num_tokens = request.num_prompt_tokens
    if not cached:
        whole = work_left(num_tokens, 0)
        return [whole / endpoint.load.prefill.tokens_per_second for endpoint in endpoints]
    works = {depth: work_left(num_tokens, depth) for depth in {0, *cached.values()}}  # most endpoints share a depth
    return [works[cached.get(endpoint.url, 0)] / endpoint.load.prefill.tokens_per_second for endpoint in endpoints]


def work_left(num_tokens: int, num_cached_tokens: int) -> float:
    """The last token is always computed; what is believed to be cached may be more than was asked."""
    num_cached_tokens = min(num_cached_tokens, max(num_tokens - 1, 0))
    return work(num_tokens - num_cached_tokens, num_cached_tokens)
