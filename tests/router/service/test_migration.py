"""When an engine that drains is asked to hand its streams over."""

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from kvasir_router.endpoints.address import Address
from kvasir_router.service.ledger import Ledger
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.migration import Migration
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import EndpointState, Registry

pytestmark = pytest.mark.anyio
OLD, OTHER = Address("http://old", revision="1"), Address("http://other", revision="1")


class Engines:
    """An engine that drains with something in flight, and another one; what the first is asked."""

    def __init__(self, *, revision: str = "1", max_in_flight: int = 1, state: EndpointState = EndpointState.READY):
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.bodies: list[dict[str, str] | None] = []
        self.status = 202
        self.error: Exception | None = None
        self.num_in_flight = 1
        self.registry = Registry(
            lambda: EndpointLoad(max_in_flight, FleetPrefill().new_member()), lambda: None, own_models={"m"}
        )
        self.registry.set_addresses({OLD, Address(OTHER.url, revision=revision)}, state)
        self.registry.set_state(OLD.url, EndpointState.NOT_READY)

    async def drain(self, secret: str | None = None) -> list[tuple[str, dict[str, str]]]:
        ledger = cast(Ledger, SimpleNamespace(num_in_flight=lambda url: self.num_in_flight if url == OLD.url else 0))
        await self.migration(secret, ledger).drains(OLD)
        return self.asked

    def migration(self, secret: str | None, ledger: Ledger | None = None) -> Migration:
        return Migration(self.registry, cast(Ledger, ledger), cast(aiohttp.ClientSession, self), secret)

    @contextlib.asynccontextmanager
    async def post(self, url: str, *, headers: dict[str, str], **options: Any) -> AsyncIterator[Any]:
        if self.error is not None:
            raise self.error
        self.asked.append((url, headers))
        self.bodies.append(options.get("json"))
        yield SimpleNamespace(status=self.status)


async def test_it_is_asked_while_another_can_take_its_streams() -> None:
    assert await Engines().drain() == [("http://old/migrate", {})]


async def test_the_router_proves_itself() -> None:
    assert await Engines().drain("s3cret") == [("http://old/migrate", {"x-kvasir-router-secret": "s3cret"})]


async def test_with_nothing_in_flight_there_is_nothing_to_ask() -> None:
    engines = Engines()
    engines.num_in_flight = 0
    assert await engines.drain() == []


@pytest.mark.parametrize(
    "engines",
    [Engines(revision="2"), Engines(max_in_flight=0), Engines(state=EndpointState.NOT_READY)],
    ids=["revision", "room", "state"],
)
async def test_streams_stay_where_no_other_of_its_revision_has_room(engines: Engines) -> None:
    assert await engines.drain() == []


@pytest.mark.parametrize(("num_in_flight", "asks"), [(2, True), (3, False)])
async def test_it_is_asked_only_where_there_is_room_for_all_of_them(num_in_flight: int, asks: bool) -> None:
    engines = Engines(max_in_flight=2)
    engines.num_in_flight = num_in_flight
    assert bool(await engines.drain()) is asks


@pytest.mark.parametrize(("status", "accepts"), [(202, True), (409, False), (404, False)])
async def test_one_stream_is_asked_for_by_its_id(status: int, accepts: bool) -> None:
    engines = Engines()
    engines.status = status
    assert await engines.migration("s3cret").hand_over("http://full", "a") is accepts
    assert engines.asked == [("http://full/migrate/request", {"x-kvasir-router-secret": "s3cret"})]
    assert engines.bodies == [{"request_id": "a"}]


@pytest.mark.parametrize("error", [TimeoutError(), aiohttp.ClientConnectionError("gone")])
async def test_who_cannot_be_asked_hands_nothing_over(error: Exception) -> None:
    engines = Engines()
    engines.error = error
    assert await engines.migration(None).hand_over("http://full", "a") is False


@pytest.mark.parametrize("error", [TimeoutError(), aiohttp.ClientConnectionError("gone")])
async def test_an_engine_that_does_not_answer_is_let_alone(error: Exception) -> None:
    engines = Engines()
    engines.error = error
    assert await engines.drain() == []
