"""The terms of an endpoint's cost, added up by `finish_time`. To add one, write it and name it at the end.

A term gives the seconds of every endpoint at once: calls for each of them would cost more than the arithmetic. A
derived one knows the other terms only, which are computed once.
"""

from collections.abc import Callable, Mapping, Sequence

from kvasir_router.placement.placement import Fetch
from kvasir_router.prefix_index.index import Cached
from kvasir_router.request import InferenceRequest
from kvasir_router.service.load import KV_BARRIER_START, EndpointLoad
from kvasir_router.service.prefill_rate import CONTEXT_DOUBLING_TOKENS, work
from kvasir_router.service.registry import Endpoint

# A token resident in a decode batch is read once a step; a token of prefill goes through every weight once. The ratio
# only has to tell an empty endpoint from a busy one when their prefill queues are equal.
DECODE_WEIGHT = 0.05
# A second of the answer, in seconds of waiting for its first token.
ANSWER_WEIGHT = 0.5
# The barrier: 0 s where it starts, at 80 %; 0.5 s at 90 %, 1.5 s at 95 %, 20 s when full.
KV_BARRIER_SECONDS = 0.5
_FULL = 0.995
_GROWTH = 0.5 / CONTEXT_DOUBLING_TOKENS
# A second in which a stream that has begun stands still, in seconds of waiting for a first token. Streams are mostly
# read more slowly than they come, so that a pause is felt less than a late beginning. Where others could prefill for
# the endpoint, and where each prefills for itself: both by measurement (docs/decisions/0029, 0023).
STALL_WEIGHT = 0.05
MIXED_STALL_WEIGHT = 0.1
# Of the tokens in decode, where all requests go on with a conversation: its later calls weigh as much as this one.
LATER_CALLS_WEIGHT = 0.5
# Seconds of others for each second of own prefill: so many for each second of the shortest queue, up to the most.
DELAY_PER_QUEUE_SECOND = 32.0
MOST_DELAY = 32.0


Term = Callable[[InferenceRequest, Sequence[Endpoint], Cached, float], list[float]]
"""Seconds that it adds on each endpoint, for the request, what is cached of it, and now."""
DerivedTerm = Callable[[Mapping[str, Sequence[float]], Sequence[Endpoint]], list[float]]
"""Seconds that it adds on each endpoint, of which there is at least one, by those that other terms do."""


def prefill_queue(request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> list[float]:
    """What is ahead: until the engine could begin with this request's prefill."""
    return [
        left if (left := load.prefill_done_at - now) > load.prefill_rest_seconds else load.prefill_rest_seconds
        for load in [endpoint.load for endpoint in endpoints]
    ]


def own_prefill(request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> list[float]:
    """The request's own prefill: what of its prompt is not cached there, at the rate measured there."""
    num_tokens = request.num_prompt_tokens
    if not cached:
        whole = work_left(num_tokens, 0)
        return [whole / endpoint.load.prefill.tokens_per_second for endpoint in endpoints]
    most, whole = max(num_tokens - 1, 0), work(num_tokens)
    works = {  # work_left, without a call for each
        depth: whole - (least := depth if depth < most else most) * (1 + least * _GROWTH)
        for depth in {0, *cached.values()}
    }
    return [works[cached.get(endpoint.url, 0)] / endpoint.load.prefill.tokens_per_second for endpoint in endpoints]


def work_left(num_tokens: int, num_cached_tokens: int) -> float:
    """The last token is always computed; what is believed to be cached may be more than was asked."""
    num_cached_tokens = min(num_cached_tokens, max(num_tokens - 1, 0))
    return work(num_tokens - num_cached_tokens, num_cached_tokens)


def decode_load(request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> list[float]:
    """By the streams that each endpoint has now."""
    loads = [endpoint.load for endpoint in endpoints]
    return decode_seconds(request, loads, [load.resident_tokens for load in loads])


def decode_seconds(
    request: InferenceRequest, loads: Sequence[EndpointLoad], resident_tokens: Sequence[float]
) -> list[float]:
    """What the answer takes longer than on an empty endpoint that decodes as fast as most: by the KV that decodes read
    in each step, and by the steps of an endpoint that is slower.
    """
    answer = ANSWER_WEIGHT * request.num_output_tokens
    return [
        DECODE_WEIGHT * tokens / rate.tokens_per_second
        if not (rate := load.prefill).excess_step_seconds
        else DECODE_WEIGHT * tokens / rate.tokens_per_second * rate.decode_slowness + answer * rate.excess_step_seconds
        for load, tokens in zip(loads, resident_tokens, strict=True)
    ]


def tokens_met(loads: Sequence[EndpointLoad], returning_share: float, now: float) -> list[float]:
    """Tokens in decode that a conversation will meet on each endpoint, by this call and by its later ones.

    It comes back to where it began, for minutes, and so do those that are between two calls just now. So by the share
    of requests that go on with one, the fleet's tokens count as they were spread in the last minutes, else as they are.
    """
    weight = LATER_CALLS_WEIGHT * returning_share
    recent = [load.recent_tokens(now) for load in loads]
    spread = weight * sum(load.resident_tokens for load in loads) / (sum(recent) or 1.0)
    return [(1 - weight) * load.resident_tokens + spread * each for load, each in zip(loads, recent, strict=True)]


def kv_barrier(request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> list[float]:
    """A barrier as the KV cache fills: where it is full, requests wait for others to end, or preempt them.

    What a request adds is its uncached tokens and its output. A prefix that it shares is there once for all who use it.
    """
    added = request.num_prompt_tokens + request.num_output_tokens
    return [
        0.0
        if added <= endpoint.load.kv_room_tokens
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


def decode_stall(request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> list[float]:
    """What this request's prefill costs those that decode on the same endpoint: each of their tokens comes later."""
    own = own_prefill(request, endpoints, cached, now)
    return [STALL_WEIGHT * endpoint.load.num_decoding * each for endpoint, each in zip(endpoints, own, strict=True)]


def stall_of_prefill(columns: Mapping[str, Sequence[float]], endpoints: Sequence[Endpoint]) -> list[float]:
    """As `decode_stall`, by the prefill that is known already."""
    return [
        MIXED_STALL_WEIGHT * num * own if (num := endpoint.load.num_decoding) > 0 else 0.0
        for endpoint, own in zip(endpoints, columns["own_prefill"], strict=True)
    ]


def delay_to_others(columns: Mapping[str, Sequence[float]], endpoints: Sequence[Endpoint]) -> list[float]:
    """What this request's prefill costs those behind it: nothing where some endpoint is idle, more the longer all are
    busy.

    While every endpoint has a queue, work that is done twice delays everybody until the queues have drained. So the
    longer the shortest queue, the more a cached prefix is worth. It is the one term that looks beyond the request
    itself. Only what is more than the least counts: the rest is the same wherever it goes.
    """
    own, shortest = columns["own_prefill"], min(columns["prefill_queue"])
    if shortest <= 0:
        return [0.0] * len(own)
    weight = min(DELAY_PER_QUEUE_SECOND * shortest, MOST_DELAY)
    least = min(own)
    return [weight * (each - least) for each in own]


class PrefixFetch:
    """What fetching a prefix from a peer saves of the request's own prefill, less the transfer beyond what is ahead
    anyway.

    Blocks come while the endpoint works on its queue. `own_prefill` stays what it would compute alone, and with it
    `delay_to_others`: a prefix held twice takes the place of another, which costs everybody while all have a queue.

    `fetches`: what endpoints would fetch, by their urls.
    """

    def __init__(self, fetches: Mapping[str, Fetch]) -> None:
        self._fetches = fetches

    def __call__(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> list[float]:
        return [
            0.0 if (fetch := self._fetches.get(endpoint.url)) is None else -fetch.gained_seconds
            for endpoint in endpoints
        ]


TERMS: dict[str, Term] = {
    "prefill_queue": prefill_queue,
    "own_prefill": own_prefill,
    "decode_load": decode_load,
    "kv_barrier": kv_barrier,
}
DERIVED_TERMS: dict[str, DerivedTerm] = {"delay_to_others": delay_to_others}
"""Of who prefills, whatever it does besides."""
MIXED_TERMS: dict[str, DerivedTerm] = DERIVED_TERMS | {"decode_stall": stall_of_prefill}
"""The same where every endpoint decodes what it prefills."""


def columns_of(
    terms: Mapping[str, Term],
    derived: Mapping[str, DerivedTerm],
    request: InferenceRequest,
    endpoints: Sequence[Endpoint],
    cached: Cached,
    now: float,
) -> dict[str, list[float]]:
    """Each term's seconds of all endpoints, of which there is at least one."""
    columns = {name: term(request, endpoints, cached, now) for name, term in terms.items()}
    for name, term in derived.items():
        columns[name] = term(columns, endpoints)
    return columns
