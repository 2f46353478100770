"""Requests and endpoints as the router's parts see them, for tests of those parts."""

import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvasir_router.dialects.text_prompts import Completions
from kvasir_router.endpoints.address import Address, Role
from kvasir_router.prefix_index.index import PrefixKey
from kvasir_router.request import InferenceRequest
from kvasir_router.service.load import EndpointLoad, InFlight
from kvasir_router.service.load_report import LoadReport
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import Endpoint


def num_calls(work: Callable[[], object]) -> int:
    """Python functions that are called."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return events.count("call")


def num_bytes_kept(work: Callable[[], object]) -> int:
    """Of memory that is still held after it."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


class Clock:
    """A router's that the test sets ahead."""

    def __init__(self) -> None:
        self.seconds_ahead = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.seconds_ahead


@dataclass(frozen=True)
class Tokens:
    """The key of no index: only a prompt's length."""

    num_tokens: int


def a_request(num_tokens: int = 100, prefix: PrefixKey | None = None, **fields: Any) -> InferenceRequest:
    """A streamed completion for the model m."""
    values: dict[str, Any] = {"dialect": Completions(), "model": "m", "is_stream": True}
    return InferenceRequest(**values | {"prefix": prefix or Tokens(num_tokens)} | fields)


def an_endpoint(
    url: str,
    *,
    prefill_rate: float = 1000.0,
    prefill_tokens: int = 0,
    resident_tokens: int = 0,
    max_in_flight: int = 512,
    revision: str = "",
    traffic_weight: float | None = None,
    role: Role = Role.SERVE,
    **load: Any,
) -> Endpoint:
    """A ready one. One request decodes there and one is prefilled; `load` are attributes of its load."""
    found = EndpointLoad(max_in_flight, FleetPrefill(prefill_rate).new_member())
    decoding = InFlight("decoding", 0, resident_tokens, 0)
    found.begin(decoding, 0.0)
    found.end_prefill(decoding, 0.0)
    found.begin(InFlight("other", 0, prefill_tokens, 0), 0.0)
    found.num_in_flight = 0
    found.scraped(load.pop("kv_usage", None), load.pop("kv_capacity_tokens", None), None, 0.0)
    for name, value in load.items():
        setattr(found, name, value)
    return Endpoint(Address(url, role=role, revision=revision, traffic_weight=traffic_weight), found)


def an_exchanging(url: str, *, port: int = 5600, **options: Any) -> Endpoint:
    """The same of an engine that exchanges cached prefixes with others."""
    endpoint = an_endpoint(url, **options)
    endpoint.load.report(LoadReport(0, 0, 0, 0, 0, 0, 0.0, None, (), "i", kv_transfer_port=port), 0.0)
    return endpoint


def chatting(endpoint: Endpoint, request_id: str, *, cached: int, uncached: int, num_output_tokens: int = 256) -> None:
    """One more request decodes there."""
    request = InFlight(request_id, cached, uncached, num_output_tokens)
    endpoint.load.begin(request, 0.0)
    endpoint.load.end_prefill(request, 0.0)
