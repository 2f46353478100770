"""Late binding: a request stays in the router while every engine that could take it has enough prefill ahead.

An engine works off its queue in its own order. What waits here instead keeps the router's: priorities and shares hold,
and a request is placed by what is known when it can start, not when it came.

Routers that share engines wait for the same moment. Peers tell what they would start next: for each whose request goes
before, a router's bound is a little lower, so that it sees room a moment later, and by then has heard of that start. No
peer is waited for, and of all that wait anywhere the most delayed starts first.

Of routers that are no peers only the engines tell. The more of what is ahead there is others', the more a router's
bound grows with the slowdown of its next request: who gets little gets its turn sooner, and of all that wait anywhere
the most delayed tends to start first, though no router knows of another. A router alone keeps the bound.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log2

from kvasir_router.endpoints.address import Role
from kvasir_router.placement.pairing import Pairing, partners
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.registry import Endpoint, Registry

# Of the slowdown, the time that a request has waited over that of its prefill. Beyond it, engines would hold the queue.
_MOST_DOUBLINGS = 4.0
# Of prefill for each peer whose next request goes before: longer than news of its start takes.
_PEER_SECONDS = 0.02
# Of the bound, however many they are: an engine must not idle.
_MOST_FOR_PEERS = 0.5


def _nobody(response_ratio: Callable[[], float]) -> int:
    return 0


@dataclass(frozen=True)
class LateBinding:
    """`max_prefill_seconds`: what an engine may have ahead; enough for it never to idle until it is sent more. Where
    all of that is other routers', as much again for each doubling of the slowdown.

    `pairing` None: every engine prefills for itself. `num_before`: peers whose next request goes before, by its ratio.
    """

    registry: Registry
    max_prefill_seconds: float
    clock: Callable[[], float]
    pairing: Pairing | None = None
    num_before: Callable[[Callable[[], float]], int] = _nobody

    def seconds_to_room(self, model: str | None, response_ratio: Callable[[], float]) -> float:
        """Until some endpoint has room for the model and little ahead. 0.0: now; inf: not by time alone.

        `response_ratio`: of the request that would start, in seconds per token of work.
        """
        now = self.clock()
        for_peers = min(self.num_before(response_ratio) * _PEER_SECONDS, self.max_prefill_seconds * _MOST_FOR_PEERS)
        limit = self.max_prefill_seconds - for_peers
        seconds = self._seconds_within(limit, model, now)
        if seconds:
            endpoints = (*self.registry.serving(model), *self.registry.prefilling(model))
            growth = _growth(endpoints, response_ratio)
            if growth > 1.0:
                seconds = self._seconds_within(limit * growth, model, now)
        return seconds

    def _seconds_within(self, limit: float, model: str | None, now: float) -> float:
        elsewhere = self._seconds_elsewhere(limit, model, now)
        soonest = inf
        for endpoint in self.registry.serving(model):
            if endpoint.has_room:
                soonest = min(soonest, self._seconds_to_prefill(endpoint, elsewhere, limit, now))
                if not soonest:
                    break
        return soonest

    def _seconds_elsewhere(self, limit: float, model: str | None, now: float) -> Mapping[str, float]:
        """Until some engine that prefills for others has little ahead, by the revision that it does so for."""
        if self.pairing is None or not self.registry.is_disaggregated:
            return {}
        seconds: dict[str, float] = {}
        for partner in partners(self.registry.prefilling(model), now):
            own = _seconds_to_room(partner.load, limit, now)
            seconds[partner.revision] = min(own, seconds.get(partner.revision, inf))
        return seconds

    def _seconds_to_prefill(self, decode: Endpoint, elsewhere: Mapping[str, float], limit: float, now: float) -> float:
        """There or elsewhere. Where long prompts must go elsewhere, nothing starts until they could."""
        own = _seconds_to_room(decode.load, limit, now)
        if self.pairing is None or decode.role is not Role.DECODE or decode.revision not in elsewhere:
            return own
        by_partner = elsewhere[decode.revision]
        return min(own, by_partner) if self.pairing.remote_min_tokens is None else by_partner


def _growth(endpoints: Sequence[Endpoint], response_ratio: Callable[[], float]) -> float:
    """Of the bound: 1.0 where nothing there is other routers'."""
    foreign = sum(endpoint.load.foreign_prefill_seconds for endpoint in endpoints)
    if not foreign:
        return 1.0
    foreign_share = foreign / (foreign + sum(endpoint.load.own_prefill_seconds for endpoint in endpoints))
    slowdown = response_ratio() * max(endpoint.load.prefill.tokens_per_second for endpoint in endpoints)
    return 1.0 + foreign_share * min(log2(1.0 + slowdown), _MOST_DOUBLINGS)


def _seconds_to_room(load: EndpointLoad, limit: float, now: float) -> float:
    """Nothing is held back because of a guess. What has not begun is worked off by no time that is known."""
    if not load.is_queue_known:
        return 0.0
    return inf if load.prefill_rest_seconds > limit else max(load.prefill_done_at - now - limit, 0.0)
