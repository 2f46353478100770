"""The endpoints of one service: which there are, in what state, and which of them can take a request; and which models
it answers for.

`Endpoint` is the one live object of an engine. The registry, the prober and the ledger write it; policies only read it.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from enum import StrEnum
from typing import Any

from kvasir_router.endpoints.address import Address, Role
from kvasir_router.errors import UnknownModelError
from kvasir_router.service.load import EndpointLoad


class EndpointState(StrEnum):
    UNKNOWN = "unknown"  # not probed yet
    READY = "ready"
    NOT_READY = "not_ready"  # it says so: loading or draining
    UNREACHABLE = "unreachable"  # no connection, no answer, or unhealthy by its own word, until a probe succeeds


class Endpoint:
    """`models` is what it lists, its model and adapters, each with the most tokens of a request; None until it has told
    (of a length: it does not tell)."""

    __slots__ = ("address", "load", "models", "state", "suspect_until", "url")

    def __init__(self, address: Address, load: EndpointLoad, state: EndpointState = EndpointState.READY) -> None:
        self.url = address.url
        self.address = address
        self.load = load
        self.state = state
        self.models: Mapping[str, int | None] | None = None
        self.suspect_until = 0.0  # of the service's clock: it has failed, and is used where there is no other

    @property
    def uid(self) -> str:
        return self.address.uid

    @property
    def role(self) -> Role:
        return self.address.role

    @property
    def revision(self) -> str:
        return self.address.revision

    @property
    def traffic_weight(self) -> float | None:
        """Percent of all requests that its revision gets; None: a part of the rest."""
        return self.address.traffic_weight

    @property
    def has_room(self) -> bool:
        return self.load.num_in_flight < self.load.max_in_flight


class Registry:
    """`own_models` are served by every endpoint, whatever else it lists; where there is none, an endpoint is used once
    it has said what it serves. `on_change` is called whenever an endpoint may have become usable.
    """

    def __init__(
        self, new_load: Callable[[], EndpointLoad], on_change: Callable[[], None], own_models: Set[str] = frozenset()
    ) -> None:
        self._new_load = new_load
        self._on_change = on_change
        self._own_models = frozenset(own_models)
        self._endpoints: dict[str, Endpoint] = {}
        self._serving: dict[str | None, tuple[Endpoint, ...]] = {}  # by model; filled when asked, emptied by changes
        self._prefilling: dict[str | None, tuple[Endpoint, ...]] = {}  # the same of those that only prefill
        self.is_disaggregated = False
        """Some endpoint has a part of requests only."""

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints.values())

    @property
    def is_empty(self) -> bool:
        return not self._endpoints

    def get(self, url: str) -> Endpoint | None:
        return self._endpoints.get(url)

    def set_addresses(self, addresses: Set[Address], initial_state: EndpointState) -> tuple[Endpoint, ...]:
        """Keeps what is known of addresses that stay. Returns the endpoints that are gone; what is in flight there goes
        on to its end.
        """
        gone = tuple(endpoint for endpoint in self if endpoint.address not in addresses)
        for endpoint in gone:
            del self._endpoints[endpoint.url]
        for address in addresses:
            known = self._endpoints.get(address.url)
            if known is None:
                self._endpoints[address.url] = Endpoint(address, self._new_load(), initial_state)
            else:
                known.address = address  # with the labels of now
        self._changed()
        return gone

    def set_state(self, url: str, state: EndpointState) -> None:
        endpoint = self._endpoints.get(url)
        if endpoint is not None and endpoint.state != state:
            endpoint.state = state
            self._changed()

    def set_models(self, url: str, models: Mapping[str, int | None]) -> None:
        """What the endpoint lists: its model under its own name, and adapters."""
        endpoint = self._endpoints.get(url)
        if endpoint is not None and endpoint.models != models:
            endpoint.models = models
            self._changed()

    @property
    def own_models(self) -> frozenset[str]:
        """What every endpoint serves without an adapter; empty where its endpoints tell."""
        return self._own_models

    def set_own_models(self, models: frozenset[str]) -> None:
        if models != self._own_models:
            self._own_models = models
            self._changed()

    def state_of(self, url: str) -> EndpointState | None:
        endpoint = self._endpoints.get(url)
        return None if endpoint is None else endpoint.state

    def num_in_state(self, state: EndpointState) -> int:
        return sum(endpoint.state == state for endpoint in self)

    def urls(self) -> frozenset[str]:
        return frozenset(self._endpoints)

    def revisions(self) -> frozenset[str]:
        return frozenset(endpoint.revision for endpoint in self)

    def listed_models(self) -> frozenset[str]:
        """Learned from the endpoints; empty until one has answered."""
        return frozenset().union(*(endpoint.models or () for endpoint in self))

    def max_model_len(self, model: str) -> int | None:
        """Whichever endpoint gets the request; None: nobody tells."""
        told = [(endpoint.models or {}).get(model) for endpoint in self]
        return min((each for each in told if each is not None), default=None)

    def serving(self, model: str | None) -> tuple[Endpoint, ...]:
        """Those that may be sent requests for the model, room or not; without a model, any request."""
        return self._found(self._serving, model, takes_requests=True)

    def prefilling(self, model: str | None) -> tuple[Endpoint, ...]:
        """Those that may be sent prefills for decode engines, room or not."""
        return self._found(self._prefilling, model, takes_requests=False)

    def can_place(self, model: str | None, avoid: Set[str] = frozenset()) -> bool:
        """Whether some endpoint outside `avoid` could take a request for the model now."""
        return any(endpoint.has_room and endpoint.url not in avoid for endpoint in self.serving(model))

    def _found(
        self, kept: dict[str | None, tuple[Endpoint, ...]], model: str | None, *, takes_requests: bool
    ) -> tuple[Endpoint, ...]:
        known = kept.get(model)
        if known is None:
            known = tuple(
                endpoint
                for endpoint in self
                if endpoint.role.takes_requests is takes_requests and self._serves(endpoint, model)
            )
            if known:  # what nobody serves is the client's invention, and must not be kept
                kept[model] = known
        return known

    def _serves(self, endpoint: Endpoint, model: str | None) -> bool:
        if endpoint.state is not EndpointState.READY:
            return False
        if endpoint.models is None and not self._own_models:
            return False
        return model is None or model in self._own_models or model in (endpoint.models or {})

    def _changed(self) -> None:
        self._serving.clear()
        self._prefilling.clear()
        self.is_disaggregated = any(endpoint.role is not Role.SERVE for endpoint in self)
        self._on_change()


class ModelCatalog:
    """The own model, its aliases and named adapters stay listed at zero pods; `listed()` as long as an endpoint has it.

    Aliases are the router's alone: `resolve` gives the name that engines know.
    """

    def __init__(
        self,
        own: str | None,
        aliases: tuple[str, ...],
        adapters: tuple[str, ...],
        listed: Callable[[], Set[str]],
        created: int,
        max_model_len: Callable[[str], int | None] = lambda model: None,
    ) -> None:
        self._own = own
        self._aliases = dict.fromkeys(aliases, own)
        self._adapters = dict.fromkeys(adapters)
        self._listed = listed
        self._created = created
        self._max_model_len = max_model_len

    def names(self) -> tuple[str, ...]:
        """The own model, its aliases and adapters, then all others."""
        named = dict.fromkeys((*(() if self._own is None else (self._own,)), *self._aliases, *self._adapters))
        return (*named, *sorted(self._listed() - named.keys()))

    def resolve(self, model: str) -> str:
        return self._aliases.get(model) or model

    def is_known(self, model: str) -> bool:
        if model == self._own or model in self._aliases or model in self._adapters:
            return True
        return model in self._listed()

    def check(self, model: str | None) -> None:
        """Raises UnknownModelError (404). A missing name is the engine's to judge; nothing known refuses nothing."""
        if model is None or self.is_known(model):
            return
        known = self.names()
        if known:
            raise UnknownModelError(
                f"the model {model!r} is not served here; served are: {', '.join(known)}", param="model"
            )

    def cards(self) -> list[dict[str, Any]]:
        return [self.card(name) for name in self.names()]

    def card(self, name: str) -> dict[str, Any]:
        """One entry of /v1/models; an alias names the model it stands for as its root."""
        root = self.resolve(name)
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "kvasir", "root": root}
        length = self._max_model_len(root)
        return card if length is None else card | {"max_model_len": length}
