"""Filter, then the revision whose turn it is, then the policy's placement. No clock, no network.

A request is split by weight once: where it has failed before, it may go wherever it can be served.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from kvasir_router.placement.pairing import Pairing, partners
from kvasir_router.placement.placement import Placement, Policy
from kvasir_router.placement.prefix_fetching import FetchingPolicy, PrefixFetching, Written, peers
from kvasir_router.placement.traffic_split import TrafficSplit
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint


def candidates(endpoints: Sequence[Endpoint], avoid: Set[str], now: float) -> Sequence[Endpoint]:
    """Those with room; those in `avoid`, and those that have just failed others, only when no other is left."""
    fitting = [endpoint for endpoint in endpoints if endpoint.has_room]
    untried = [endpoint for endpoint in fitting if endpoint.url not in avoid] if avoid else fitting
    choice = untried or fitting
    return [endpoint for endpoint in choice if endpoint.suspect_until <= now] or choice


class OnPlaced(Protocol):
    def __call__(
        self,
        policy: Policy,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        cached: Mapping[str, int],
        placement: Placement,
        now: float,
    ) -> None:
        """`endpoints` are those among which the policy has chosen."""
        ...


class Picker:
    """`on_placed` is told of every placement before it is dispatched. `pairing` None: nobody prefills for others.
    `fetching` None: nobody fetches from others.
    """

    def __init__(
        self,
        policy: Policy,
        on_placed: OnPlaced | None = None,
        pairing: Pairing | None = None,
        fetching: PrefixFetching | None = None,
    ) -> None:
        self._policy = policy
        self._on_placed = on_placed
        self._pairing = pairing
        self._fetching = fetching
        self._split = TrafficSplit()

    @property
    def policy_name(self) -> str:
        return type(self._policy).__name__

    def pick(
        self,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        cached: Mapping[str, int],
        now: float,
        avoid: Set[str] = frozenset(),
        prefills: Sequence[Endpoint] | None = None,
        written: Written | None = None,
    ) -> Placement | None:
        """On one of the endpoints, which serve the model; None when none has room. `avoid`: it has failed there.
        `prefills` may prefill for those that decode; None: the service has no such roles. `written`: what engines say
        that they have cached; None: this request's KV is not fetched.
        """
        choice = candidates(endpoints, avoid, now)
        if not choice:
            return None
        if not avoid:
            choice = self._split.choose(choice)
        policy = self._policy
        fetches = None
        exchanging = endpoints if prefills is None else [*prefills, *endpoints]
        if self._fetching is not None and written is not None and (able := peers(exchanging, now, avoid)):
            fetches = self._fetching.among(able, written)
        if self._pairing is not None and prefills is not None:
            policy = self._pairing.policy(policy, partners(prefills, now, avoid), fetches)
        elif fetches is not None:
            policy = FetchingPolicy(policy, fetches)
        placement = policy.place(request, choice, cached, now)
        if self._on_placed is not None:
            self._on_placed(policy, request, choice, cached, placement, now)
        return placement
