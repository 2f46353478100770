"""One model service: its engines, what is in flight there, what it answers for, and how it admits and places requests.
It ties the parts together; each decides for itself.

Of all that this process routes for, `Services` knows whose a request's model is: dedicated mode has one, a gateway one
for each InferenceService in its scope.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvasir_router.admission.admission import Admission
from kvasir_router.admission.queue import HeldDemand
from kvasir_router.config import PolicyName
from kvasir_router.dialects.responses import mark_of
from kvasir_router.endpoints.address import Address
from kvasir_router.errors import (
    UpstreamBusyError,
    UpstreamConnectError,
    UpstreamDoubtfulError,
    UpstreamError,
    UpstreamLateError,
)
from kvasir_router.picker import Picker
from kvasir_router.placement.costs import work_left
from kvasir_router.placement.pairing import Pairing
from kvasir_router.placement.placement import Placement, decode_leg_on
from kvasir_router.placement.prefix_fetching import PrefixFetching, Written
from kvasir_router.prefix_index.index import PrefixIndex
from kvasir_router.relay.upstream_pool import Origin
from kvasir_router.request import InferenceRequest
from kvasir_router.service.health import Prober
from kvasir_router.service.in_flight_limits import FadingCount, InFlightLimits
from kvasir_router.service.ledger import Ledger, Ticket
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import Endpoint, EndpointState, ModelCatalog, Registry

if TYPE_CHECKING:
    from kvasir_router.service.following import Following  # large, and not every router has it

_NOTHING_CACHED: Mapping[str, int] = {}


BUCKETS_SECONDS = (1, 2.5, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600)

_GIVEN_UP_AFTER_WAITS = 3


_SHARE = 0.2
# One engine that dies takes with it what it was doing: so many a second may always be repeated.
_MIN_RETRIES_PER_SECOND = 10.0
_WINDOW_SECONDS = 10.0


class RetryBudget:
    """How many requests may be repeated elsewhere: a share of those that come, so that engines which all fail are not
    asked several times as often as engines which answer. Counts of about the last ten seconds: they fade.
    """

    def __init__(self) -> None:
        self._requests = FadingCount(_WINDOW_SECONDS)
        self._retries = FadingCount(_WINDOW_SECONDS)

    def count_request(self, now: float) -> None:
        self._requests.add(1, now)

    def has_left(self, now: float) -> bool:
        """Whether another attempt may be made."""
        most = _MIN_RETRIES_PER_SECOND * _WINDOW_SECONDS + _SHARE * self._requests.at(now)
        return self._retries.at(now) + 1 <= most

    def take(self, now: float) -> bool:
        """The same, and the attempt is counted."""
        if not self.has_left(now):
            return False
        self._retries.add(1, now)
        return True


class Wakes:
    """How long requests of a service without ready engines wait for one: from the first that comes to the first that is
    sent.

    Where all that waited have left before, nothing is counted. Reads no clock.
    """

    def __init__(self) -> None:
        self._begun_at: float | None = None
        self._asked_at = 0.0
        self._counts = [0] * (len(BUCKETS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def asked_for(self, now: float, max_wait_seconds: float) -> None:
        """A request comes and there is no engine: none waits for longer. Retries follow, or the wake was given up."""
        if self._begun_at is None or now - self._asked_at > _GIVEN_UP_AFTER_WAITS * max_wait_seconds:
            self._begun_at = now
        self._asked_at = now

    def sent(self, now: float, *, has_waited: bool) -> None:
        """A request goes to an engine. `has_waited`: it was held before."""
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is not None and has_waited:
            self._counts[bisect_left(BUCKETS_SECONDS, now - begun_at)] += 1
            self.sum_seconds += now - begun_at

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and how many took at most so long, as Prometheus has them."""
        bounds = [*(f"{float(bound)}" for bound in BUCKETS_SECONDS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


@dataclass(eq=False, kw_only=True)
class Service:
    """`router_secret` is what its engines know this router by; None where nothing is set. `clock` counts seconds.

    `pairing` None: no engine of it prefills for another. `fetching` None: none fetches what others have cached.
    """

    name: str
    registry: Registry
    ledger: Ledger
    prefill: FleetPrefill
    in_flight_limits: InFlightLimits
    prober: Prober
    following: "Following | None"
    """Learns what engines publish; None where the router was not told to."""
    index: PrefixIndex
    admission: Admission
    catalog: ModelCatalog
    policy: PolicyName
    picker: Picker
    pairing: Pairing | None
    fetching: PrefixFetching | None
    router_secret: str | None
    clock: Callable[[], float]
    retry_budget: RetryBudget = field(default_factory=RetryBudget, init=False)
    wakes: Wakes = field(default_factory=Wakes, init=False)

    def follow(self, addresses: Set[Address], initial_state: EndpointState) -> None:
        """These are its engines from now on; what is in flight at others goes on to its end."""
        for endpoint in self.registry.set_addresses(addresses, initial_state):
            self.index.withdraw(endpoint.url)
        self.prober.follow(addresses)
        if self.following is not None:
            self.following.follow(addresses)

    @property
    def is_paired(self) -> bool:
        """Its prompts may be prefilled by one engine and decoded by another."""
        return self.pairing is not None and self.registry.is_disaggregated

    def ask_for_engine(self) -> None:
        """To be called before admission: a wake begins where there is none."""
        if self.registry.is_empty:
            self.wakes.asked_for(self.clock(), self.admission.max_wait_seconds)

    def place(
        self,
        request: InferenceRequest,
        avoid: Set[str] = frozenset(),
        *,
        moved_from: str | None = None,
        num_generated_tokens: int = 0,
    ) -> Placement | None:
        """None when no endpoint can take the request now. `avoid`: urls of endpoints where it has failed. `moved_from`:
        revision of the engine that has let go of it, `num_generated_tokens` behind its prompt; others of that revision
        get its KV from there, the rest compute.
        """
        now = self.clock()
        cached = _NOTHING_CACHED if request.prefix is None else self.index.match(request.prefix, now)
        holder = None if request.holder is None else self.holder(request.holder)
        if holder is not None and holder.url not in avoid:
            return self.picker.pin(request, holder, cached, now)
        serving = self.registry.serving(request.model)
        if moved_from is None:
            prefills = self.registry.prefilling(request.model) if self.is_paired else None
            return self.picker.pick(request, serving, cached, now, avoid, prefills, self._written(request))
        receivers = [one for one in serving if one.revision == moved_from and one.url not in avoid]
        placement = self.picker.pick(request, receivers, cached, now, avoid)
        if placement is None:
            return self.picker.pick(request, serving, cached, now, avoid)
        leg = decode_leg_on(placement.leg.endpoint, request, cached)
        return replace(placement, leg=replace(leg, received_tokens=leg.received_tokens + num_generated_tokens))

    def holder(self, mark: str) -> Endpoint | None:
        """The engine of that mark; None: it is gone."""
        return next((each for each in self.registry if mark_of(Origin.parse(each.url).host_header) == mark), None)

    def _written(self, request: InferenceRequest) -> Written | None:
        prefix = request.prefix
        return None if prefix is None else lambda: self.index.written(prefix)

    def least_work(self, request: InferenceRequest) -> float:
        """What of its prefill is left to do on the endpoint that has cached the most."""
        if request.prefix is None:
            return 0.0
        cached = self.index.match(request.prefix, self.clock())
        return work_left(request.num_prompt_tokens, max(cached.values(), default=0))

    def dispatch(
        self, request: InferenceRequest, placement: Placement, *, has_waited: bool = False
    ) -> tuple[Ticket, ...]:
        """Counts the request on each leg's endpoint and expects its blocks to be cached there from now on.

        `has_waited`: it was held before.
        """
        now = self.clock()
        self.wakes.sent(now, has_waited=has_waited)
        if request.prefix is not None:
            for leg in placement.legs:
                self.index.insert(leg.endpoint.url, request.prefix, now, leg.endpoint.load.kv_capacity_tokens)
        return self.ledger.dispatch(request, placement, now)

    def withdraw(self, request: InferenceRequest, url: str) -> None:
        """The engine has not computed the prompt: that dispatch failed."""
        if request.prefix is not None:
            self.index.withdraw(url, request.prefix)

    def note_failure(self, url: str, error: UpstreamError) -> None:
        """What an attempt there says of the engine."""
        if error.is_endpoints_fault:
            self.in_flight_limits.answered(url, is_error=True)
        elif isinstance(error, UpstreamBusyError):
            self.in_flight_limits.busy(url, error.seconds)
        elif isinstance(error, (UpstreamDoubtfulError, UpstreamLateError)):
            self.in_flight_limits.busy(url)
        if isinstance(error, UpstreamConnectError):
            self.prober.eject(url)

    def refresh(self) -> None:
        """What time alone changes of its engines, room for a request among it; to be called every second."""
        now = self.clock()
        self.in_flight_limits.refresh()
        for endpoint in self.registry:
            endpoint.load.expire(now)
        self.admission.wake()

    def expire(self) -> None:
        """Forgets what is too old to be believed; to be called now and then."""
        now = self.clock()
        self.index.expire(now)
        self.prefill.refresh(now)
        if self.pairing is not None:
            self.pairing.transfers.refresh(self.registry.urls(), now)
        if self.fetching is not None:
            self.fetching.transfers.refresh(self.registry.urls(), now)

    def describe(self) -> list[dict[str, Any]]:
        """For /endpoints: everything known of each endpoint, as plain JSON."""
        return [self._describe(endpoint) for endpoint in self.registry]

    def _describe(self, endpoint: Endpoint) -> dict[str, Any]:
        load = endpoint.load
        return {
            "service": self.name,
            "url": endpoint.url,
            "state": endpoint.state,
            "circuit": self.in_flight_limits.circuit(endpoint.url),
            "role": endpoint.role,
            "revision": endpoint.revision,
            "traffic_weight": endpoint.traffic_weight,
            "models": sorted(endpoint.models) if endpoint.models is not None else None,
            "num_in_flight": load.num_in_flight,
            "max_in_flight": load.max_in_flight,
            "prefill_tokens": load.prefill_tokens,
            "resident_tokens": load.resident_tokens,
            "prefill_tokens_per_second": round(load.prefill.tokens_per_second, 1),
            "num_prefill_observations": load.prefill.num_observations,
            "kv_usage": load.kv_usage,
            "kv_capacity_tokens": load.kv_capacity_tokens,
            "kv_transfer_port": load.kv_transfer_port,
            "prefix_blocks": self.index.num_blocks(endpoint.url),
            "kv_events": None if self.following is None else self.following.describe(endpoint.url),
        }

    async def close(self) -> None:
        """Its engines are neither probed nor followed any more."""
        await self.prober.close()
        if self.following is not None:
            await self.following.close()


Follow = Callable[[Service, Set[Address]], None]
"""Has a service follow its engines' addresses."""
HeldByService = Mapping[str, Mapping[str, HeldDemand]]
"""By service, then by tenant; a service is there even where nothing of it waits."""


class Services(ABC):
    @abstractmethod
    def __iter__(self) -> Iterator[Service]:
        """Those that take requests."""

    @abstractmethod
    def of(self, model: str | None) -> Service:
        """Raises UnknownModelError (404) or MissingModelError (400)."""

    @abstractmethod
    def cards(self) -> list[dict[str, Any]]:
        """Of all models, for /v1/models."""

    @abstractmethod
    async def close(self) -> None:
        """Nobody is probed or followed any more."""

    def card(self, model: str) -> dict[str, Any]:
        """Raises UnknownModelError (404)."""
        return self.of(model).catalog.card(model)

    def wake(self) -> None:
        """A tenant may start requests again, of whichever service."""
        for service in self:
            service.admission.wake()

    def held_demand(self) -> HeldByService:
        return {service.name: service.admission.held_demand() for service in self}

    @property
    def num_ejected(self) -> int:
        return sum(service.in_flight_limits.num_ejected for service in self)

    @property
    def num_waiting(self) -> int:
        return sum(service.admission.num_waiting for service in self)

    def num_in_state(self, state: EndpointState) -> int:
        return sum(service.registry.num_in_state(state) for service in self)

    def describe(self) -> list[dict[str, Any]]:
        """For /endpoints."""
        return [endpoint for service in self for endpoint in service.describe()]


class DedicatedService(Services):
    """A list of one: it takes every request, and refuses models that it does not know itself."""

    def __init__(self, service: Service, follow: Follow) -> None:
        self._service = service
        self._follow = follow

    def __iter__(self) -> Iterator[Service]:
        return iter((self._service,))

    def of(self, model: str | None) -> Service:
        self._service.catalog.check(model)
        return self._service

    def cards(self) -> list[dict[str, Any]]:
        return self._service.catalog.cards()

    def publish(self, addresses: Set[Address]) -> None:
        """These are its engines from now on."""
        self._follow(self._service, addresses)

    async def close(self) -> None:
        await self._service.close()
