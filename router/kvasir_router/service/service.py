"""One model service: its engines, what is in flight there, what it answers for, and how it admits and places requests.

Dedicated mode has one, a gateway one for each InferenceService in its scope. It ties the parts together; each decides
for itself.
"""

from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any

from kvasir_router.admission.admission import Admission
from kvasir_router.config import PolicyName
from kvasir_router.endpoints.address import Address
from kvasir_router.picker import Picker
from kvasir_router.placement.placement import Placement
from kvasir_router.prefix_index.index import PrefixIndex
from kvasir_router.request import InferenceRequest
from kvasir_router.service.catalog import ModelCatalog
from kvasir_router.service.health import Prober
from kvasir_router.service.in_flight_limits import InFlightLimits
from kvasir_router.service.ledger import Ledger, Ticket
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import Endpoint, EndpointState, Registry
from kvasir_router.service.retry_budget import RetryBudget

if TYPE_CHECKING:
    from kvasir_router.service.following import Following  # large, and not every router has it

_NOTHING_CACHED: Mapping[str, int] = {}


class Service:
    """`router_secret` is what its engines know this router by; None where nothing is set. `clock` counts seconds.

    `following` learns what the engines publish; None where the router was not told to.
    """

    def __init__(
        self,
        name: str,
        *,
        registry: Registry,
        prefill: FleetPrefill,
        ledger: Ledger,
        catalog: ModelCatalog,
        admission: Admission,
        policy: PolicyName,
        picker: Picker,
        index: PrefixIndex,
        prober: Prober,
        in_flight_limits: InFlightLimits,
        router_secret: str | None,
        following: "Following | None",
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.registry = registry
        self._prefill = prefill
        self.ledger = ledger
        self.catalog = catalog
        self.admission = admission
        self.index = index
        self.prober = prober
        self.in_flight_limits = in_flight_limits
        self.retry_budget = RetryBudget()
        self.router_secret = router_secret
        self.following = following
        self.policy = policy
        self.picker = picker
        self._clock = clock

    def follow(self, addresses: Set[Address], initial_state: EndpointState) -> None:
        """These are its engines from now on; what is in flight at others goes on to its end."""
        for endpoint in self.registry.set_addresses(addresses, initial_state):
            self.index.withdraw(endpoint.url)
        self.prober.follow(addresses)
        if self.following is not None:
            self.following.follow(addresses)

    def place(self, request: InferenceRequest, avoid: Set[str] = frozenset()) -> Placement | None:
        """None when no endpoint can take the request now. `avoid`: urls of endpoints where it has failed."""
        now = self._clock()
        cached = _NOTHING_CACHED if request.prefix is None else self.index.match(request.prefix, now)
        return self.picker.pick(request, self.registry.serving(request.model), cached, now, avoid)

    def dispatch(self, request: InferenceRequest, placement: Placement) -> tuple[Ticket, ...]:
        """Counts the request on each leg's endpoint and expects its blocks to be cached there from now on."""
        now = self._clock()
        if request.prefix is not None:
            for leg in placement.legs:
                self.index.insert(leg.endpoint.url, request.prefix, now, leg.endpoint.load.kv_capacity_tokens)
        return self.ledger.dispatch(request, placement, now)

    def withdraw(self, request: InferenceRequest, placement: Placement) -> None:
        """The engines have not computed the prompt: that dispatch failed."""
        if request.prefix is not None:
            for leg in placement.legs:
                self.index.withdraw(leg.endpoint.url, request.prefix)

    def expire(self) -> None:
        """Forgets what is too old to be believed; to be called now and then."""
        now = self._clock()
        self.index.expire(now)
        self._prefill.refresh(now)
        for endpoint in self.registry:
            endpoint.load.expire(now)

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
            "prefix_blocks": self.index.num_blocks(endpoint.url),
            "kv_events": None if self.following is None else self.following.describe(endpoint.url),
        }

    async def close(self) -> None:
        """Its engines are neither probed nor followed any more."""
        await self.prober.close()
        if self.following is not None:
            await self.following.close()
