"""Late binding: a request stays in the router while every engine that could take it has enough prefill ahead.

An engine works off its queue in its own order. What waits here instead keeps the router's: priorities and shares hold,
and a request is placed by what is known when it can start, not when it came.
"""

from collections.abc import Callable, Sequence
from math import inf

from kvasir_router.endpoints.address import Role
from kvasir_router.placement.pairing import Pairing, partners
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.registry import Endpoint, Registry


class LateBinding:
    """`max_prefill_seconds`: what an engine may have ahead; enough for it never to idle until it is sent more.

    `pairing` None: every engine prefills for itself.
    """

    def __init__(
        self,
        registry: Registry,
        max_prefill_seconds: float,
        clock: Callable[[], float],
        pairing: Pairing | None = None,
    ) -> None:
        self._registry = registry
        self._max_prefill_seconds = max_prefill_seconds
        self._clock = clock
        self._pairing = pairing

    def seconds_to_room(self, model: str | None) -> float:
        """Until some endpoint has room for the model and little ahead. 0.0: now; inf: not by time alone."""
        now = self._clock()
        is_paired = self._pairing is not None and self._registry.is_disaggregated
        prefills = partners(self._registry.prefilling(model), now) if is_paired else ()
        soonest = inf
        for endpoint in self._registry.serving(model):
            if endpoint.has_room:
                soonest = min(soonest, self._seconds_to_prefill(endpoint, prefills, now))
                if not soonest:
                    break
        return soonest

    def _seconds_to_prefill(self, decode: Endpoint, prefills: Sequence[Endpoint], now: float) -> float:
        """There or elsewhere. Where long prompts must go elsewhere, nothing starts until they could."""
        own_partners = [each for each in prefills if each.revision == decode.revision]
        limit = self._max_prefill_seconds
        own = _seconds_to_room(decode.load, limit, now)
        if self._pairing is None or decode.role is not Role.DECODE or not own_partners:
            return own
        elsewhere = min(_seconds_to_room(partner.load, limit, now) for partner in own_partners)
        return min(own, elsewhere) if self._pairing.remote_min_tokens is None else elsewhere


def _seconds_to_room(load: EndpointLoad, limit: float, now: float) -> float:
    """Nothing is held back because of a guess. What has not begun is worked off by no time that is known."""
    if not load.is_queue_known:
        return 0.0
    return inf if load.prefill_rest_seconds > limit else max(load.prefill_done_at - now - limit, 0.0)
