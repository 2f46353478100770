"""Filter, then the revision whose turn it is, then the policy's placement. No clock, no network.

A request is split by weight once: where it has failed before, it may go wherever it can be served.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from kvasir_router.placement.pairing import Pairing, partners
from kvasir_router.placement.placement import Placement, Policy
from kvasir_router.placement.prefix_fetching import FetchingPolicy, PrefixFetching, Written, peers
from kvasir_router.prefix_index.index import Cached
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

Group = str | None
"""A revision with a weight; None stands for all revisions without one, among which the policy alone decides."""


def weights_of(endpoints: Iterable[Endpoint]) -> dict[Group, float]:
    """Percent by revision. Slices of a revision that differ are about to be the same: the highest counts."""
    weights: dict[Group, float] = {}
    for address in [endpoint.address for endpoint in endpoints]:
        if (weight := address.traffic_weight) is not None:
            weights[address.revision] = max(weights.get(address.revision, 0.0), weight)
    return weights


def shares_of(weights: Mapping[Group, float], *, has_rest: bool) -> dict[Group, float]:
    """Of each group that is to get any; their sum is 1, so groups that are absent give theirs to those present.

    Empty where all that are present have a weight of zero: better served by those than by nobody.
    """
    shares = dict(weights)
    if has_rest:
        shares[None] = max(100.0 - sum(weights.values()), 0.0)
    total = sum(shares.values())
    return {group: share / total for group, share in shares.items() if share}


class TrafficSplit:
    """Which revision a request goes to, where one is to get a fixed share of them: a canary's weight, in percent.

    By error diffusion, not by chance: each group is owed its share of every request, and the one that is owed most gets
    it whole, so each has its share within about one request. Several routers keep each to the shares, and so do they
    together.
    """

    def __init__(self) -> None:
        self._owed: dict[Group, float] = {}  # requests

    def choose(self, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those of the group whose turn it is; counts one request."""
        weights = weights_of(endpoints)
        if not weights:
            return endpoints
        groups = [endpoint.revision if endpoint.revision in weights else None for endpoint in endpoints]
        shares = shares_of(weights, has_rest=None in groups)
        if not shares:
            return endpoints
        turn = self._next(shares)
        return tuple(endpoint for endpoint, group in zip(endpoints, groups, strict=True) if group == turn)

    def _next(self, shares: Mapping[Group, float]) -> Group:
        self._owed = {group: self._owed.get(group, 0.0) + share for group, share in shares.items()}
        turn = max(self._owed, key=lambda group: self._owed[group])
        self._owed[turn] -= 1
        return turn


def candidates(endpoints: Sequence[Endpoint], avoid: Set[str], now: float) -> Sequence[Endpoint]:
    """Those with room; those in `avoid`, and those that have just failed others, only when no other is left."""
    # has_room, without a call for each
    fitting = [endpoint for endpoint in endpoints if (load := endpoint.load).num_in_flight < load.max_in_flight]
    untried = [endpoint for endpoint in fitting if endpoint.url not in avoid] if avoid else fitting
    choice = untried or fitting
    return [endpoint for endpoint in choice if endpoint.suspect_until <= now] or choice


OnPlaced = Callable[[Policy, InferenceRequest, Sequence[Endpoint], Mapping[str, int], Placement, float], None]
"""Is told of each placement at a time, with the endpoints among which the policy has chosen."""


@dataclass(eq=False)
class Picker:
    """`on_placed` is told of every placement before it is dispatched. `pairing` None: nobody prefills for others.
    `fetching` None: nobody fetches from others.
    """

    policy: Policy
    on_placed: OnPlaced | None = None
    pairing: Pairing | None = None
    fetching: PrefixFetching | None = None
    _split: TrafficSplit = field(default_factory=TrafficSplit, init=False)

    @property
    def policy_name(self) -> str:
        return type(self.policy).__name__

    def pick(
        self,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        cached: Cached,
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
        policy = self.policy
        fetches = None
        exchanging = endpoints if prefills is None else [*prefills, *endpoints]
        if self.fetching is not None and written is not None and (able := peers(exchanging, now, avoid)):
            fetches = self.fetching.among(able, written)
        if self.pairing is not None and prefills is not None:
            policy = self.pairing.policy(policy, partners(prefills, now, avoid), fetches)
        elif fetches is not None:
            policy = FetchingPolicy(policy, fetches)
        return self._placed(policy, request, choice, cached, now)

    def pin(self, request: InferenceRequest, endpoint: Endpoint, cached: Cached, now: float) -> Placement:
        """On the only endpoint that can answer it, room or not."""
        return self._placed(self.policy, request, [endpoint], cached, now)

    def _placed(
        self, policy: Policy, request: InferenceRequest, choice: Sequence[Endpoint], cached: Cached, now: float
    ) -> Placement:
        placement = policy.place(request, choice, cached, now)
        if self.on_placed is not None:
            self.on_placed(policy, request, choice, cached, placement, now)
        return placement
