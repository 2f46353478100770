"""Finish time: the endpoint that would finish this request's prefill first, as one cost in seconds.

Mooncake's conductor (Qin et al., arXiv 2407.00079) is the source of the idea; the terms and their weights are ours.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add

from kvasir_router.placement.costs import DERIVED_TERMS, TERMS, DerivedTerm, Term, columns_of
from kvasir_router.placement.placement import Placement, leg_on
from kvasir_router.prefix_index.index import Cached
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

# Rates are measured, so noisy: costs within this share of the lowest are ties.
TIE_TOLERANCE = 0.02


class FinishTime:
    """Of ties the endpoint that was idle longest wins."""

    def __init__(self, terms: Mapping[str, Term] = TERMS, derived: Mapping[str, DerivedTerm] = DERIVED_TERMS) -> None:
        self._terms = terms
        self._derived = derived

    def place(self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> Placement:
        columns: Iterable[Iterable[float]] = columns_of(
            self._terms, self._derived, request, endpoints, cached, now
        ).values()
        costs = list(reduce(_added, columns))  # a third of the time of a sum for each endpoint
        lowest = min(costs)
        limit = lowest * (1 + TIE_TOLERANCE)
        ties = [endpoint for endpoint, cost in zip(endpoints, costs, strict=True) if cost <= limit]
        choice = ties[0] if len(ties) == 1 else min(ties, key=_last_dispatch)
        return Placement(leg_on(choice, request, cached), cost_seconds=lowest)

    def costs(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> dict[str, dict[str, float]]:
        """For people: url -> the terms in seconds."""
        columns = columns_of(self._terms, self._derived, request, endpoints, cached, now)
        return {
            endpoint.url: {name: column[position] for name, column in columns.items()}
            for position, endpoint in enumerate(endpoints)
        }


def _added(one: Iterable[float], other: Iterable[float]) -> Iterable[float]:
    return map(add, one, other)


def _last_dispatch(endpoint: Endpoint) -> tuple[int, str]:
    return endpoint.load.last_dispatch, endpoint.url
