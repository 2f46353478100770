"""Whether an engine is told to fetch a prefix that a peer of its revision has cached, instead of computing it.

Any policy may choose; one that compares costs knows what each engine would fetch. Asked are only peers that have
written the blocks by their own word: a prompt that was just sent somewhere is not there to be fetched yet. What the
engine then does is its own to say: it compares again, and computes what the peer does not have.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from kvasir_router.placement.costs import TERMS, PrefixFetch, work_left
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.placement.placement import CostPolicy, Fetch, Leg, Placement, Policy
from kvasir_router.prefix_index.index import Cached, Held
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint
from kvasir_router.service.transfer_times import TransferTimes

LEAST_TOKENS = 256
"""That a peer must have more: fewer are computed in one step beside others, and are not worth a conversation."""
# Of a revision's holders those with the most: the others have less to give, and each costs arithmetic.
_MAX_PEERS = 2

Written = Callable[[], Mapping[str, Held]]
"""Url -> what of the prompt the endpoint has cached by its own word."""


class Holder(NamedTuple):
    """Of the prompt's beginning; `work_left` is what remains of its prefill behind that."""

    peer: Endpoint
    port: int  # of the rank that has them
    num_tokens: int
    work_left: float


def peers(endpoints: Sequence[Endpoint], now: float, avoid: Set[str] = frozenset()) -> Sequence[Endpoint]:
    """Those that may be asked: room or not, since they compute nothing for it."""
    return [
        endpoint
        for endpoint in endpoints
        if endpoint.load.kv_transfer_port is not None and endpoint.suspect_until <= now and endpoint.url not in avoid
    ]


class PrefixFetching:
    """One service's."""

    def __init__(self) -> None:
        self.transfers = TransferTimes()

    def among(self, peers: Sequence[Endpoint], written: Written) -> "Fetches":
        """`peers` as the function gives them."""
        return Fetches(peers, written, self.transfers)

    def learn(self, fetch: Fetch, url: str, seconds: float, now: float) -> None:
        """`seconds`: how much later a first token came than without the transfer. Behind other prompts, which hide
        the transfer, that teaches nothing.
        """
        if not fetch.queue_seconds:
            self.transfers.observe(fetch.peer_url, url, fetch.num_tokens, max(seconds, 0.0), now)


@dataclass(frozen=True, slots=True)
class Fetches:
    """What endpoints would fetch of a prompt from their peers."""

    peers: Sequence[Endpoint]
    written: Written
    transfers: TransferTimes

    def of(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> dict[str, Fetch]:
        """By url of who would fetch it; only where its prefill is done sooner so."""
        most = request.num_prompt_tokens - 1  # the last token is always computed
        deepest = min(max(cached.values(), default=0), most)
        if not request.can_transfer_kv or deepest < LEAST_TOKENS:
            return {}
        lacking = [
            endpoint
            for endpoint in endpoints
            if endpoint.load.kv_transfer_port is not None and deepest - cached.get(endpoint.url, 0) >= LEAST_TOKENS
        ]
        if not lacking:
            return {}
        holders = self._holders(request, most)
        works = {depth: work_left(request.num_prompt_tokens, depth) for depth in {0, *cached.values()}}
        fetches: dict[str, Fetch] = {}
        for endpoint in lacking:
            num_cached = cached.get(endpoint.url, 0)
            fetch = self._best(endpoint, num_cached, works[num_cached], holders.get(endpoint.revision, ()), now)
            if fetch is not None:
                fetches[endpoint.url] = fetch
        return fetches

    def _holders(self, request: InferenceRequest, most: int) -> dict[str, list[Holder]]:
        """By revision: those with the most, of ties those idle longest."""
        written = self.written()
        of_revision: dict[str, list[Holder]] = {}
        for peer in self.peers:
            held, port = written.get(peer.url), peer.load.kv_transfer_port
            if held is not None and port is not None:
                num_tokens = min(held.num_tokens, most)
                left = work_left(request.num_prompt_tokens, num_tokens)
                holder = Holder(peer, port + held.rank, num_tokens, left)
                of_revision.setdefault(peer.revision, []).append(holder)
        for found in of_revision.values():
            found.sort(key=lambda holder: (-holder.num_tokens, holder.peer.load.last_dispatch, holder.peer.url))
            del found[_MAX_PEERS:]
        return of_revision

    def _best(
        self, endpoint: Endpoint, num_cached: int, work: float, holders: Sequence[Holder], now: float
    ) -> Fetch | None:
        """`work`: of its prefill alone."""
        rate, queue_seconds = endpoint.load.prefill.tokens_per_second, endpoint.load.queue_seconds(now)
        best, most_gained = None, 0.0
        for holder in holders:
            num_more = holder.num_tokens - num_cached
            if num_more < LEAST_TOKENS:  # as of the endpoint itself
                break
            transfer = self.transfers.estimate_seconds(holder.peer.url, endpoint.url, num_more)
            gained = (work - holder.work_left) / rate - max(transfer - queue_seconds, 0.0)
            if gained > most_gained:
                best, most_gained = holder, gained
        if best is None:
            return None
        return Fetch(best.peer.url, best.port, best.num_tokens - num_cached, most_gained, queue_seconds)


@dataclass(frozen=True, slots=True)
class FetchingPolicy:
    """A policy whose endpoints may fetch from one another."""

    policy: Policy
    fetches: Fetches

    def place(self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> Placement:
        fetches = self.fetches.of(request, endpoints, cached, now)
        if not fetches:
            return self.policy.place(request, endpoints, cached, now)
        policy = _knowing(self.policy, fetches) if isinstance(self.policy, CostPolicy) else self.policy
        placement = policy.place(request, endpoints, cached, now)
        fetch = fetches.get(placement.leg.endpoint.url)
        return placement if fetch is None else replace(placement, leg=fetching_leg(placement.leg, fetch), fetch=fetch)

    def costs(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> Mapping[str, Mapping[str, float]]:
        """For people: url -> the terms in seconds; of none where the policy compares no costs."""
        if not isinstance(self.policy, CostPolicy):
            return {}
        return _knowing(self.policy, self.fetches.of(request, endpoints, cached, now)).costs(
            request, endpoints, cached, now
        )


def fetching_leg(leg: Leg, fetch: Fetch) -> Leg:
    """The same where part of what it would compute is fetched."""
    return Leg(leg.endpoint, leg.cached_tokens, leg.uncached_tokens - fetch.num_tokens, fetch.num_tokens)


def _knowing(policy: CostPolicy, fetches: Mapping[str, Fetch]) -> CostPolicy:
    if not fetches or not isinstance(policy, FinishTime):
        return policy
    return FinishTime({**TERMS, "prefix_fetch": PrefixFetch(fetches)}, prefixes=policy.prefixes)
