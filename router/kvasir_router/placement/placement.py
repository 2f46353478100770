"""What a policy decides: which endpoint serves a request, or which prefills and which decodes it.

Policies read live endpoints and never write them; apart from the state that breaks their ties they are pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from kvasir_router.prefix_index.index import Cached
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint


class Leg(msgspec.Struct, frozen=True):
    """An endpoint's part of a request, with the prompt tokens that it has cached, those that it must compute, and
    those whose KV it gets from another endpoint, which computes them for it or has them cached.
    """

    endpoint: Endpoint
    cached_tokens: int
    uncached_tokens: int
    received_tokens: int = 0


class LocalPrefill(StrEnum):
    """Why a decode engine prefills a prompt itself."""

    CHEAPER = "cheaper"
    SHORT = "short"  # fewer uncached tokens than --remote-prefill-min-tokens
    NO_PREFILL_ENDPOINT = "no_prefill_endpoint"  # of its revision, ready, with room, and not just failed
    UNSUPPORTED = "unsupported"  # several prompts or answers, too many values, or an API whose KV is not handed over


@dataclass(frozen=True, slots=True)
class Fetch:
    """A prefix that an endpoint is to fetch from a peer, which has it cached."""

    peer_url: str
    peer_port: int  # of its side channel
    num_tokens: int  # behind those that the endpoint has cached itself
    gained_seconds: float  # by which the first token comes sooner: prefill saved, less the transfer beyond the queue
    queue_seconds: float  # ahead at the endpoint, which hide as many of the transfer


class Placement(msgspec.Struct, frozen=True):
    leg: Leg  # serves the request, or decodes it where another prefills
    prefill: Leg | None = None
    cost_seconds: float | None = None  # what the policy expects; None where it compares no costs
    local_prefill: LocalPrefill | None = None  # None: another prefills, or the endpoint has no such role
    fetch: Fetch | None = None  # by who prefills; None: what that has not cached it computes

    @property
    def legs(self) -> tuple[Leg, ...]:
        return (self.leg,) if self.prefill is None else (self.leg, self.prefill)


class Policy(Protocol):
    def place(self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float) -> Placement:
        """On one of `endpoints`, of which there is at least one. `cached`: url -> tokens of this prompt, where any."""
        ...


@runtime_checkable
class CostPolicy(Policy, Protocol):
    """A policy that compares costs, and can be asked for them."""

    def costs(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
    ) -> Mapping[str, Mapping[str, float]]:
        """For people: url -> the terms in seconds."""
        ...


def leg_on(endpoint: Endpoint, request: InferenceRequest, cached: Cached) -> Leg:
    cached_tokens = min(cached.get(endpoint.url, 0), request.num_prompt_tokens)
    return Leg(endpoint, cached_tokens, request.num_prompt_tokens - cached_tokens)


def decode_leg_on(endpoint: Endpoint, request: InferenceRequest, cached: Cached) -> Leg:
    """Of a prompt that another endpoint prefills."""
    alone = leg_on(endpoint, request, cached)
    return Leg(endpoint, alone.cached_tokens, 0, received_tokens=alone.uncached_tokens)
