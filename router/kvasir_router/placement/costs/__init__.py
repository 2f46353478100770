"""The terms of an endpoint's cost: one file each, added up by `finish_time`. To add one, write it and name it here.

A term gives the seconds of every endpoint at once: calls for each of them would cost more than the arithmetic. A
derived one knows the other terms only, which are computed once.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvasir_router.placement.costs import decode_load, delay_to_others, kv_barrier, own_prefill, prefill_queue
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint


class Term(Protocol):
    def __call__(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
    ) -> list[float]:
        """Seconds that it adds on each endpoint. `cached`: url -> tokens of this prompt, where any."""
        ...


class DerivedTerm(Protocol):
    def __call__(self, columns: Mapping[str, Sequence[float]]) -> list[float]:
        """Seconds that it adds on each endpoint, of which there is at least one, by those that other terms do."""
        ...


TERMS: dict[str, Term] = {
    "prefill_queue": prefill_queue.seconds,
    "own_prefill": own_prefill.seconds,
    "decode_load": decode_load.seconds,
    "kv_barrier": kv_barrier.seconds,
}
DERIVED_TERMS: dict[str, DerivedTerm] = {"delay_to_others": delay_to_others.seconds}


def columns_of(
    terms: Mapping[str, Term],
    derived: Mapping[str, DerivedTerm],
    request: InferenceRequest,
    endpoints: Sequence[Endpoint],
    cached: Mapping[str, int],
    now: float,
) -> dict[str, list[float]]:
    """Each term's seconds of all endpoints, of which there is at least one."""
    columns = {name: term(request, endpoints, cached, now) for name, term in terms.items()}
    return columns | {name: term(columns) for name, term in derived.items()}
