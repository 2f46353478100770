"""Finish time: the endpoint that would finish this request's prefill first, as one cost in seconds.

Mooncake's conductor (Qin et al., arXiv 2407.00079) is the source of the idea; the terms and their weights are ours.

A prefix that many ask for is computed once more where that pays. No request would do so by its own cost: it alone would
pay for the prefill, and all that come after it would gain. So each that goes where the prefix is cached, though another
endpoint would be cheaper if it had the prefix too, adds to what has been lost for that prefix. The one with which the
loss reaches the price, the prefill there for itself and for each stream that stands still meanwhile, is placed as if it
were cached there (rent or buy: Karlin et al. 1988). One that alone loses half of the price pays at once: mostly the
prefix is just being computed, and waiting for that takes more than half as long as a copy, which later costs all of it.

Where conversations come back, an endpoint that is idle between their calls is not free (`costs.tokens_met`).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import add, sub

from kvasir_router.placement.asked_prefixes import AskedPrefixes
from kvasir_router.placement.costs import (
    ANSWER_WEIGHT,
    MIXED_TERMS,
    TERMS,
    DerivedTerm,
    Term,
    columns_of,
    decode_seconds,
    tokens_met,
)
from kvasir_router.placement.placement import Placement, leg_on
from kvasir_router.prefix_index.index import Cached, SharedPrefix
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

# Rates are measured, so noisy: costs within this share of the lowest are ties.
TIE_TOLERANCE = 0.02
# Of a loss to the answer: every second of it, and as many again that the streams there lose to it.
EVERYBODY_WEIGHT = 2 / ANSWER_WEIGHT
_ADDED = partial(map, add)


class FinishTime:
    """Of ties the endpoint that was idle longest wins."""

    def __init__(
        self,
        terms: Mapping[str, Term] = TERMS,
        derived: Mapping[str, DerivedTerm] = MIXED_TERMS,
        prefixes: AskedPrefixes | None = None,
    ) -> None:
        self._terms = terms
        self._derived = derived
        self.prefixes = prefixes or AskedPrefixes()

    def place(self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> Placement:
        by_term = self._columns(request, endpoints, cached, now)
        columns: Iterable[Iterable[float]] = by_term.values()
        costs = list(reduce(_ADDED, columns))  # a third of the time of a sum for each endpoint
        prefix = _prefix_of(request, cached)
        if self.prefixes.ask(prefix) and prefix is not None:
            self._replicate(prefix, by_term, costs, endpoints)
        lowest = min(costs)
        limit = lowest * (1 + TIE_TOLERANCE)
        ties = [endpoints[position] for position, cost in enumerate(costs) if cost <= limit]
        choice = ties[0] if len(ties) == 1 else min(ties, key=_last_dispatch)
        return Placement(leg_on(choice, request, cached), cost_seconds=lowest)

    def _replicate(
        self,
        prefix: int,
        by_term: Mapping[str, Sequence[float]],
        costs: list[float],
        endpoints: Sequence[Endpoint],
    ) -> None:
        """Takes the prefill off the cost of the endpoint that would be the cheapest without, where that is paid for."""
        own, decode = by_term["own_prefill"], by_term["decode_load"]
        if (fetch := by_term.get("prefix_fetch")) is not None:
            own = list(map(add, own, fetch))
        prefills = list(map(add, map(add, own, by_term["delay_to_others"]), by_term["decode_stall"]))
        without = list(map(sub, costs, prefills))
        lowest, least = min(without), min(own)
        best, choice = without.index(lowest), costs.index(min(costs))
        if own[best] == least:
            return  # the prefix is there
        cost = lowest + prefills[own.index(least)]
        longer = decode[choice] - decode[best]
        loss = costs[choice] - cost + (EVERYBODY_WEIGHT - 1) * longer
        price = (own[best] - least + by_term["delay_to_others"][best]) * (1 + endpoints[best].load.num_decoding)
        if self.prefixes.is_paid(prefix, max(loss, 0.0), price):
            costs[best] = cost

    def costs(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> dict[str, dict[str, float]]:
        """For people: url -> the terms in seconds."""
        columns = self._columns(request, endpoints, cached, now)
        return {
            endpoint.url: {name: column[position] for name, column in columns.items()}
            for position, endpoint in enumerate(endpoints)
        }

    def _columns(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> dict[str, list[float]]:
        columns = columns_of(self._terms, self._derived, request, endpoints, cached, now)
        if (share := self.prefixes.returning_share) and "decode_load" in columns:
            loads = [endpoint.load for endpoint in endpoints]
            columns["decode_load"] = decode_seconds(request, loads, tokens_met(loads, share, now))
        return columns


def _prefix_of(request: InferenceRequest, cached: Cached) -> int | None:
    """What of the prompt is cached anywhere, by its name."""
    prefix = request.prefix
    return prefix.beginning(max(cached.values())) if cached and isinstance(prefix, SharedPrefix) else None


def _last_dispatch(endpoint: Endpoint) -> tuple[int, str]:
    return endpoint.load.last_dispatch, endpoint.url
