"""Late binding: a request stays in the router while every engine that could take it has enough prefill ahead.

An engine works off its queue in its own order. What waits here instead keeps the router's: priorities and shares hold,
and a request is placed by what is known when it can start, not when it came.

Routers that share engines wait for the same moment. Peers tell what they would start next: for each whose request goes
before, a router's bound is a little lower, so that it sees room a moment later, and by then has heard of that start. No
peer is waited for, and of all that wait anywhere the most delayed starts first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from kvasir_router.endpoints.address import Role
from kvasir_router.placement.pairing import Pairing, partners
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.registry import Endpoint, Registry

# Of prefill for each peer whose next request goes before: longer than news of its start takes.
_PEER_SECONDS = 0.02
# Of the bound, however many they are: an engine must not idle.
_MOST_FOR_PEERS = 0.5


@dataclass(frozen=True)
class LateBinding:
    """`max_prefill_seconds`: what an engine may have ahead; enough for it never to idle until it is sent more.

    `pairing` None: every engine prefills for itself. `num_before`: peers whose next request goes before, by its ratio;
    None: there are no peers.
    """

    registry: Registry
    max_prefill_seconds: float
    clock: Callable[[], float]
    pairing: Pairing | None = None
    num_before: Callable[[Callable[[], float]], int] | None = None

    def seconds_to_room(self, model: str | None, response_ratio: Callable[[], float]) -> float:
        """Until some endpoint has room for the model and little ahead. 0.0: now; inf: not by time alone.

        `response_ratio`: of the request that would start, in seconds per token of work.
        """
        now = self.clock()
        limit = self.max_prefill_seconds
        if self.num_before is not None:
            limit -= min(self.num_before(response_ratio) * _PEER_SECONDS, limit * _MOST_FOR_PEERS)
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


def _seconds_to_room(load: EndpointLoad, limit: float, now: float) -> float:
    """Nothing is held back because of a guess. What has not begun is worked off by no time that is known."""
    if not load.is_queue_known:
        return 0.0
    return inf if load.prefill_rest_seconds > limit else max(load.prefill_done_at - now - limit, 0.0)
