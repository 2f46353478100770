"""Seconds until the first token of every pair: a decode engine that prefills itself, or another that does it for it.

Terms are finish_time's, on whichever side they belong to, and three more: `decode_stall` of a local prefill, and of a
remote one `kv_transfer`, which is what the pair's transfers were seen to take once their prefill had ended, and
`decode_queue`, what then is left of the prompts that the decode engine computes itself: its first step waits for them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvasir_router.placement.costs import DERIVED_TERMS, TERMS, DerivedTerm, PrefixFetch, Term, columns_of, decode_stall
from kvasir_router.placement.finish_time import TIE_TOLERANCE
from kvasir_router.placement.placement import Fetch, decode_leg_on
from kvasir_router.prefix_index.index import Cached
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint
from kvasir_router.service.transfer_times import TransferTimes

# For each decode engine so many prefill engines of its revision are compared: the others would be behind anyway, unless
# transfers from all of these were slow.
_MAX_PARTNERS = 4


class Sides(NamedTuple):
    """Which terms count where. Most are about the engine that prefills; KV is needed on both sides."""

    decode: Mapping[str, Term]  # what a request adds where it decodes
    remote: Mapping[str, Term]
    local: Mapping[str, Term]

    @classmethod
    def of(cls, terms: Mapping[str, Term]) -> "Sides":
        decode = {name: terms[name] for name in ("decode_load", "kv_barrier")}
        remote = {name: term for name, term in terms.items() if name != "decode_load"}
        local = {name: term for name, term in terms.items() if name not in decode}
        return cls(decode, remote, {**local, "decode_stall": decode_stall})


SIDES = Sides.of(TERMS)


class Pair(NamedTuple):
    decode: Endpoint
    prefill: Endpoint | None  # None: the decode engine prefills
    seconds: float


class PairCosts:
    """Of one request. `partners` are the prefill engines that are compared, by revision; of ties those idle longest."""

    def __init__(
        self,
        request: InferenceRequest,
        decodes: Sequence[Endpoint],
        prefills: Sequence[Endpoint],
        cached: Cached,
        now: float,
        transfers: TransferTimes,
        fetches: Mapping[str, Fetch],
        sides: Sides = SIDES,
    ) -> None:
        """`fetches`: what engines would fetch from one another, by url."""
        self._transfers = transfers
        self._decode = _Column(sides.decode, {}, request, decodes, cached, now)
        fetch_term: dict[str, Term] = {"prefix_fetch": PrefixFetch(fetches)} if fetches else {}
        self._local = _Column({**sides.local, **fetch_term}, DERIVED_TERMS, request, decodes, cached, now)
        self._remote = _Column({**sides.remote, **fetch_term}, DERIVED_TERMS, request, prefills, cached, now)
        self._queue_seconds = {decode.url: decode.load.queue_seconds(now) for decode in decodes}
        self._lacking = {decode.url: decode_leg_on(decode, request, cached).received_tokens for decode in decodes}
        self.partners = self._shortlists(prefills)

    def lacking_tokens(self, decode: Endpoint) -> int:
        """Of the prompt: it computes or receives them."""
        return self._lacking[decode.url]

    def local(self, decode: Endpoint) -> Pair:
        return Pair(decode, None, self._local.seconds[decode.url] + self._decode.seconds[decode.url])

    def remote(self, decode: Endpoint, prefill: Endpoint) -> Pair:
        return Pair(decode, prefill, self._remote_seconds(decode, prefill) + self._decode.seconds[decode.url])

    def is_no_later(self, pair: Pair) -> bool:
        """Than if the decode engine prefilled what it lacks of the prompt, if anything, itself: of ties too."""
        decode, prefill = pair.decode, pair.prefill
        if prefill is None:
            return True
        limit = self._local.seconds[decode.url] * (1 + TIE_TOLERANCE)
        return self._lacking[decode.url] > 0 and self._remote_seconds(decode, prefill) <= limit

    def terms(self, pair: Pair) -> dict[str, float]:
        """For people; their sum is the pair's seconds."""
        terms = self._decode.terms_of(pair.decode.url)
        if pair.prefill is None:
            return self._local.terms_of(pair.decode.url) | terms
        prefill = self._remote.terms_of(pair.prefill.url)
        prefill["kv_barrier"] += terms.pop("kv_barrier")
        arrival = self._arrival_seconds(pair.decode, pair.prefill)
        behind = {
            "kv_transfer": self._transfer_seconds(pair.decode, pair.prefill),
            "decode_queue": max(self._queue_seconds[pair.decode.url] - arrival, 0.0),
        }
        return prefill | behind | terms

    def _remote_seconds(self, decode: Endpoint, prefill: Endpoint) -> float:
        return max(self._arrival_seconds(decode, prefill), self._queue_seconds[decode.url])

    def _arrival_seconds(self, decode: Endpoint, prefill: Endpoint) -> float:
        """Until the KV is there."""
        return self._remote.seconds[prefill.url] + self._transfer_seconds(decode, prefill)

    def _transfer_seconds(self, decode: Endpoint, prefill: Endpoint) -> float:
        return self._transfers.estimate_seconds(prefill.url, decode.url, self._lacking[decode.url])

    def _shortlists(self, prefills: Sequence[Endpoint]) -> dict[str, list[Endpoint]]:
        seconds = self._remote.seconds
        of_revision: dict[str, list[Endpoint]] = {}
        for prefill in prefills:
            of_revision.setdefault(prefill.revision, []).append(prefill)
        for found in of_revision.values():
            limit = min(seconds[prefill.url] for prefill in found) * (1 + TIE_TOLERANCE)
            found.sort(key=lambda prefill: (max(seconds[prefill.url], limit), prefill.load.last_dispatch, prefill.url))
            del found[_MAX_PARTNERS:]
        return of_revision


class _Column:
    """The terms of one side, of each endpoint that could take it, by url."""

    def __init__(
        self,
        terms: Mapping[str, Term],
        derived: Mapping[str, DerivedTerm],
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        cached: Cached,
        now: float,
    ) -> None:
        columns = columns_of(terms, derived, request, endpoints, cached, now) if endpoints else {}
        self._names = tuple(columns)
        rows = zip(*columns.values(), strict=True)
        self._rows = {endpoint.url: row for endpoint, row in zip(endpoints, rows, strict=True)}
        self.seconds: dict[str, float] = {url: sum(row) for url, row in self._rows.items()}

    def terms_of(self, url: str) -> dict[str, float]:
        return dict(zip(self._names, self._rows[url], strict=True))
