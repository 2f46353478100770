"""The services that this process routes for, and which of them a request's model belongs to."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from typing import Any

from kvasir_router.endpoints.address import Address
from kvasir_router.service.registry import EndpointState
from kvasir_router.service.series import HeldByService
from kvasir_router.service.service import Service

Follow = Callable[[Service, Set[Address]], None]
"""Has a service follow its engines' addresses."""


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
