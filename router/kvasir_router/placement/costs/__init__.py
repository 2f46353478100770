"""The terms of an endpoint's cost: one file each, added up by `finish_time`. To add one, write it and name it in TERMS.

A term gives the seconds of every endpoint at once: calls for each of them would cost more than the arithmetic.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvasir_router.placement.costs import decode_load, delay_to_others, kv_barrier, own_prefill, prefill_queue
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint


class Term(Protocol):
    def __call__(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
    ) -> list[float]:
        """Seconds that it adds on each endpoint. `cached`: url -> tokens of this prompt, where any."""
        ...


TERMS: dict[str, Term] = {
    "prefill_queue": prefill_queue.seconds,
    "own_prefill": own_prefill.seconds,
    "decode_load": decode_load.seconds,
    "kv_barrier": kv_barrier.seconds,
    "delay_to_others": delay_to_others.seconds,
}
