"""Which revision a request goes to, where a revision is to get a fixed share of them: a canary's weight, in percent.

Shares are met by error diffusion, not by chance: each group is owed its share of every request, and the one that is
owed most gets it whole. So after any number of requests each has had its share of them, within about one request.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvasir_router.service.registry import Endpoint

Group = str | None
"""A revision with a weight; None stands for all revisions without one, among which the policy alone decides."""


def weights_of(endpoints: Iterable[Endpoint]) -> dict[Group, float]:
    """Percent by revision. Slices of a revision that differ are about to be the same: the highest counts."""
    weights: dict[Group, float] = {}
    for endpoint in endpoints:
        if endpoint.traffic_weight is not None:
            weights[endpoint.revision] = max(weights.get(endpoint.revision, 0.0), endpoint.traffic_weight)
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
    """Of one router: several keep each to the shares, and so do they together."""

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
