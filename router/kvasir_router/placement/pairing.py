"""Whether a prompt is prefilled where it is decoded or by another engine, and by which: by time to the first token.

Only engines of the role decode are paired, with those of the role prefill and of their own revision. A policy that
compares costs chooses among all pairs; any other is asked for each leg, and costs decide whether there is a second.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from kvasir_router.endpoints.address import Role
from kvasir_router.placement.finish_time import TIE_TOLERANCE
from kvasir_router.placement.pair_costs import Pair, PairCosts
from kvasir_router.placement.placement import (
    CostPolicy,
    Fetch,
    LocalPrefill,
    Placement,
    Policy,
    decode_leg_on,
    leg_on,
)
from kvasir_router.placement.prefix_fetching import Fetches, fetching_leg
from kvasir_router.prefix_index.index import Cached
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint
from kvasir_router.service.transfer_times import TransferTimes


def partners(prefills: Sequence[Endpoint], now: float, avoid: Set[str] = frozenset()) -> Sequence[Endpoint]:
    """Those that may prefill for others: any that fails may be left out, since there is local prefill."""
    return [
        endpoint
        for endpoint in prefills
        if endpoint.has_room and endpoint.suspect_until <= now and endpoint.url not in avoid
    ]


class Pairing:
    """One service's. `remote_min_tokens`: prompts with fewer uncached tokens are prefilled where they are decoded, all
    others elsewhere; None: the cost decides.
    """

    def __init__(self, remote_min_tokens: int | None = None) -> None:
        self.remote_min_tokens = remote_min_tokens
        self.transfers = TransferTimes()

    def policy(self, policy: Policy, prefills: Sequence[Endpoint], fetches: Fetches | None = None) -> "PairedPolicy":
        """`prefills` as `partners` gives them. `fetches` None: no engine fetches from another."""
        return PairedPolicy(policy, prefills, self.transfers, self.remote_min_tokens, fetches)


@dataclass(frozen=True, slots=True)
class PairedPolicy:
    """A policy beside which other endpoints than those that it chooses from may prefill."""

    policy: Policy
    prefills: Sequence[Endpoint]
    transfers: TransferTimes
    remote_min_tokens: int | None
    fetches: Fetches | None

    def place(self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> Placement:
        decodes, prefills = self._choice(request, endpoints, cached, now)
        fetches = self._fetched(request, [*decodes, *prefills], cached, now)
        costs = PairCosts(request, decodes, prefills, cached, now, self.transfers, fetches)
        pairs = self._pairs(costs, decodes)
        if self.remote_min_tokens is None:
            pairs = filter(costs.is_no_later, pairs)
        pair = _cheapest(list(pairs))
        seconds = pair.seconds if isinstance(self.policy, CostPolicy) else None
        prefilling = pair.prefill or pair.decode
        alone, fetch = leg_on(prefilling, request, cached), fetches.get(prefilling.url)
        leg = alone if fetch is None else fetching_leg(alone, fetch)
        if pair.prefill is not None:
            return Placement(decode_leg_on(pair.decode, request, cached), leg, seconds, fetch=fetch)
        why_local = self._why_local(request, pair.decode, alone.uncached_tokens)
        return Placement(leg, None, seconds, why_local, fetch)

    def pair_costs(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> dict[tuple[str, str | None], dict[str, float]]:
        """For people: urls of decode and prefill -> the terms in seconds, of every pair that is compared; of none where
        the policy compares no costs.
        """
        if not isinstance(self.policy, CostPolicy):
            return {}
        decodes, prefills = self._choice(request, endpoints, cached, now)
        fetches = self._fetched(request, [*decodes, *prefills], cached, now)
        costs = PairCosts(request, decodes, prefills, cached, now, self.transfers, fetches)
        return {
            (pair.decode.url, None if pair.prefill is None else pair.prefill.url): costs.terms(pair)
            for pair in self._pairs(costs, decodes)
        }

    def _choice(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> tuple[Sequence[Endpoint], Sequence[Endpoint]]:
        """To decode and to prefill: one each where the policy has its own way to choose."""
        prefills = self.prefills if request.can_transfer_kv else ()
        if isinstance(self.policy, CostPolicy):
            return endpoints, prefills
        decode = self.policy.place(request, endpoints, cached, now).leg.endpoint
        prefills = [prefill for prefill in prefills if prefill.revision == decode.revision]
        if prefills:
            prefills = [self.policy.place(request, prefills, cached, now).leg.endpoint]
        return (decode,), prefills

    def _fetched(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> Mapping[str, Fetch]:
        return {} if self.fetches is None else self.fetches.of(request, endpoints, cached, now)

    def _pairs(self, costs: PairCosts, decodes: Sequence[Endpoint]) -> Iterator[Pair]:
        min_tokens = self.remote_min_tokens
        for decode in decodes:
            partners = costs.partners.get(decode.revision, ()) if decode.role is Role.DECODE else ()
            is_short = min_tokens is not None and costs.lacking_tokens(decode) < min_tokens
            if is_short or min_tokens is None or not partners:
                yield costs.local(decode)
            if not is_short:
                for prefill in partners:
                    yield costs.remote(decode, prefill)

    def _why_local(self, request: InferenceRequest, decode: Endpoint, num_uncached_tokens: int) -> LocalPrefill | None:
        if decode.role is not Role.DECODE:
            return None
        if not request.can_transfer_kv:
            return LocalPrefill.UNSUPPORTED
        if self.remote_min_tokens is not None and num_uncached_tokens < self.remote_min_tokens:
            return LocalPrefill.SHORT
        has_partner = any(prefill.revision == decode.revision for prefill in self.prefills)
        return LocalPrefill.CHEAPER if has_partner else LocalPrefill.NO_PREFILL_ENDPOINT


def _cheapest(pairs: Sequence[Pair]) -> Pair:
    """Of ties one that leaves no prompt to who decodes, then the one whose engines were idle longest."""
    limit = min(pair.seconds for pair in pairs) * (1 + TIE_TOLERANCE)
    return min((pair for pair in pairs if pair.seconds <= limit), key=_rank_of_tie)


def _rank_of_tie(pair: Pair) -> tuple[bool, int, str, int, str]:
    decode, prefill = pair.decode, pair.prefill or pair.decode
    is_local = pair.prefill is None
    return is_local, decode.load.last_dispatch, decode.url, prefill.load.last_dispatch, prefill.url
