"""The endpoints as this router knows them right now: health, own requests in flight, measured rates, cached prefixes.

The one mutable picture; policies see only its snapshots. It does no I/O: sources, the prober and the app report to it.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvasir_router.endpoints.endpoint import Address, EndpointView, Snapshot
from kvasir_router.prefill_rate import PrefillRateFit
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.request import InferenceRequest

# Tokens/s assumed until the first observation: an 8B model on one recent GPU.
_PRIOR_PREFILL_RATE = 8000.0


class EndpointState(StrEnum):
    UNKNOWN = "unknown"  # not probed yet
    READY = "ready"
    NOT_READY = "not_ready"  # it says so: loading or draining
    UNREACHABLE = "unreachable"  # no connection, no answer, or unhealthy by its own word, until a probe succeeds


@dataclass(slots=True)
class _Endpoint:
    address: Address
    state: EndpointState
    rate: PrefillRateFit = field(default_factory=lambda: PrefillRateFit(_PRIOR_PREFILL_RATE))
    num_in_flight: int = 0
    prefill_tokens: int = 0
    resident_tokens: int = 0
    last_dispatch: int = 0
    kv_usage: float | None = None
    kv_capacity_tokens: int | None = None
    models: frozenset[str] | None = None


class Ticket:
    """One request's share of an endpoint's load. Both steps may be repeated; only the first call counts.

    `on_hung`, set by whoever waits for the answer, is called when the endpoint is found to answer no more.
    """

    def __init__(
        self,
        endpoint: _Endpoint,
        request: InferenceRequest,
        uncached_tokens: int,
        now: float,
        on_finish: Callable[["Ticket"], None],
    ) -> None:
        self.url = endpoint.address.url
        self.on_hung: Callable[[], None] = _do_nothing
        self._endpoint = endpoint
        self._on_finish = on_finish
        self._uncached_tokens = uncached_tokens
        self._resident_tokens = request.num_resident_tokens
        self._dispatched_at = now
        self._is_prefilling = True
        self._is_finished = False
        endpoint.num_in_flight += 1
        endpoint.prefill_tokens += uncached_tokens
        endpoint.resident_tokens += self._resident_tokens
        self._tokens_ahead = endpoint.prefill_tokens

    @property
    def expected_prefill_seconds(self) -> float:
        return self._endpoint.rate.estimate_seconds(self._tokens_ahead)

    def first_token(self, now: float) -> None:
        """A stream's first bytes came: its prefill is over, and how long it took is one observation of the rate."""
        if self._is_prefilling and self._uncached_tokens:
            self._endpoint.rate.observe(self._tokens_ahead, now - self._dispatched_at)
        self.release_prefill()

    def release_prefill(self) -> None:
        if self._is_prefilling:
            self._is_prefilling = False
            self._endpoint.prefill_tokens -= self._uncached_tokens

    def finish(self) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        self.release_prefill()
        self._endpoint.num_in_flight -= 1
        self._endpoint.resident_tokens -= self._resident_tokens
        self._on_finish(self)


def _do_nothing() -> None:
    """A request that nobody can interrupt."""


class Fleet:
    """`on_room` is called whenever an endpoint may take one more request.

    `own_models` are served by every endpoint, whatever else it lists; where there is none, an endpoint is used once it
    has said what it serves.
    """

    def __init__(
        self,
        index: ApproximatePrefixIndex,
        clock: Callable[[], float],
        on_room: Callable[[], None],
        *,
        max_in_flight: int,
        block_tokens: int,
        own_models: Set[str] = frozenset(),
    ) -> None:
        self._index = index
        self._clock = clock
        self._on_room = on_room
        self._max_in_flight = max_in_flight
        self._block_tokens = block_tokens
        self._own_models = frozenset(own_models)
        self._endpoints: dict[str, _Endpoint] = {}
        self._tickets: set[Ticket] = set()
        self._num_dispatches = 0

    def set_addresses(self, addresses: Set[Address], initial_state: EndpointState) -> None:
        """Keeps what is known of addresses that stay; a gone endpoint's requests in flight go on to their end."""
        for url in [url for url, known in self._endpoints.items() if known.address not in addresses]:
            del self._endpoints[url]
            self._index.forget(url)
        for address in addresses:
            known = self._endpoints.setdefault(address.url, _Endpoint(address, initial_state))
            known.address = address  # with the labels of now
        self._on_room()

    def set_state(self, url: str, state: EndpointState) -> None:
        endpoint = self._endpoints.get(url)
        if endpoint is not None and endpoint.state != state:
            endpoint.state = state
            self._on_room()

    def set_models(self, url: str, models: frozenset[str]) -> None:
        """What the endpoint lists: its model under its own name, and adapters."""
        endpoint = self._endpoints.get(url)
        if endpoint is not None and endpoint.models != models:
            endpoint.models = models
            self._on_room()

    def set_kv(self, url: str, usage: float | None, capacity_tokens: int | None) -> None:
        endpoint = self._endpoints.get(url)
        if endpoint is not None:
            endpoint.kv_usage, endpoint.kv_capacity_tokens = usage, capacity_tokens

    def expire_prefixes(self) -> None:
        """Frees the memory of prefixes past their lifetime; to be called now and then."""
        self._index.expire(self._clock())

    def interrupt(self, url: str) -> None:
        """Tells the requests in flight there, known endpoint or gone, that no answer will come."""
        for ticket in [ticket for ticket in self._tickets if ticket.url == url]:
            ticket.on_hung()

    def has_in_flight(self, url: str) -> bool:
        return any(ticket.url == url for ticket in self._tickets)

    def urls(self) -> frozenset[str]:
        return frozenset(self._endpoints)

    def revisions(self) -> frozenset[str]:
        return frozenset(endpoint.address.revision for endpoint in self._endpoints.values())

    def state_of(self, url: str) -> EndpointState | None:
        endpoint = self._endpoints.get(url)
        return None if endpoint is None else endpoint.state

    def num_in_state(self, state: EndpointState) -> int:
        return sum(endpoint.state == state for endpoint in self._endpoints.values())

    def known_models(self) -> frozenset[str]:
        """Learned from the endpoints; empty until one has answered."""
        return frozenset().union(*(endpoint.models or () for endpoint in self._endpoints.values()))

    def can_place(self, model: str | None, avoid: Set[str] = frozenset()) -> bool:
        """Whether some endpoint outside `avoid` could take a request for the model now."""
        return any(
            endpoint.num_in_flight < self._max_in_flight
            and url not in avoid
            and (model is None or model in self._models_of(endpoint))
            for url, endpoint in self._endpoints.items()
            if self._is_usable(endpoint)
        )

    def snapshot(self, request: InferenceRequest, avoid: Set[str] = frozenset()) -> Snapshot:
        now = self._clock()
        views = (
            self._view(endpoint, request, now) for endpoint in self._endpoints.values() if self._is_usable(endpoint)
        )
        return Snapshot(tuple(views), frozenset(avoid))

    def dispatch(self, request: InferenceRequest, choice: EndpointView) -> Ticket:
        """Counts the request on the chosen endpoint and expects its blocks to be cached there from now on."""
        endpoint = self._endpoints[choice.url]
        now = self._clock()
        self._num_dispatches += 1
        endpoint.last_dispatch = self._num_dispatches
        capacity = endpoint.kv_capacity_tokens
        capacity_blocks = None if capacity is None else capacity // self._block_tokens
        self._index.insert(choice.url, request.block_hashes, now, capacity_blocks)
        uncached_tokens = max(request.num_prompt_tokens - choice.cached_tokens, 0)
        ticket = Ticket(endpoint, request, uncached_tokens, now, self._finished)
        self._tickets.add(ticket)
        return ticket

    def describe(self) -> list[dict[str, Any]]:
        """For /endpoints: everything known of each endpoint, as plain JSON."""
        return [self._describe(url, endpoint) for url, endpoint in self._endpoints.items()]

    def _finished(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        self._on_room()

    def _is_usable(self, endpoint: _Endpoint) -> bool:
        return (
            endpoint.state is EndpointState.READY
            and endpoint.address.role.takes_requests
            and (endpoint.models is not None or bool(self._own_models))
        )

    def _models_of(self, endpoint: _Endpoint) -> frozenset[str]:
        return self._own_models | endpoint.models if endpoint.models else self._own_models

    def _view(self, endpoint: _Endpoint, request: InferenceRequest, now: float) -> EndpointView:
        url = endpoint.address.url
        return EndpointView(
            url=url,
            revision=endpoint.address.revision,
            traffic_weight=endpoint.address.traffic_weight,
            prefill_rate=endpoint.rate.tokens_per_second,
            num_in_flight=endpoint.num_in_flight,
            max_in_flight=self._max_in_flight,
            prefill_tokens=endpoint.prefill_tokens,
            resident_tokens=endpoint.resident_tokens,
            cached_tokens=self._index.num_matched_blocks(url, request.block_hashes, now) * self._block_tokens,
            kv_capacity_tokens=endpoint.kv_capacity_tokens,
            kv_usage=endpoint.kv_usage,
            last_dispatch=endpoint.last_dispatch,
            models=self._models_of(endpoint),
        )

    def _describe(self, url: str, endpoint: _Endpoint) -> dict[str, Any]:
        return {
            "url": url,
            "state": endpoint.state,
            "role": endpoint.address.role,
            "revision": endpoint.address.revision,
            "traffic_weight": endpoint.address.traffic_weight,
            "models": sorted(endpoint.models) if endpoint.models is not None else None,
            "num_in_flight": endpoint.num_in_flight,
            "prefill_tokens": endpoint.prefill_tokens,
            "resident_tokens": endpoint.resident_tokens,
            "prefill_tokens_per_second": round(endpoint.rate.tokens_per_second, 1),
            "num_prefill_observations": endpoint.rate.num_observations,
            "kv_usage": endpoint.kv_usage,
            "kv_capacity_tokens": endpoint.kv_capacity_tokens,
            "prefix_blocks": self._index.num_blocks(url),
        }
