"""Late binding: a request stays in the router while every engine that could take it has enough prefill ahead.

An engine works off its queue in its own order. What waits here instead keeps the router's: priorities and shares hold,
and a request is placed by what is known when it can start, not when it came.
"""

from collections.abc import Callable

from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.registry import Registry


class LateBinding:
    """`max_prefill_seconds`: what an engine may have ahead; enough for it never to idle until it is sent more."""

    def __init__(self, registry: Registry, max_prefill_seconds: float, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._max_prefill_seconds = max_prefill_seconds
        self._clock = clock

    def can_start(self, model: str | None) -> bool:
        """Whether some endpoint has room for a request for the model, and little ahead."""
        now = self._clock()
        return any(
            endpoint.has_room and self._has_little_ahead(endpoint.load, now)
            for endpoint in self._registry.serving(model)
        )

    def _has_little_ahead(self, load: EndpointLoad, now: float) -> bool:
        """Nothing is held back because of a guess."""
        return not load.is_queue_known or load.queue_seconds(now) <= self._max_prefill_seconds
