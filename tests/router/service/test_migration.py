"""When an engine that drains is asked to hand its streams over."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from kvasir_router.endpoints.address import Address
from kvasir_router.service.ledger import Ledger
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.load_report import LoadReport
from kvasir_router.service.migration import Migration
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import EndpointState, Registry

pytestmark = pytest.mark.anyio
OLD, OTHER = Address("http://old", revision="1"), Address("http://other", revision="1")


@dataclass
class Stream:
    number: int
    can_move: bool = True

    @property
    def request_id(self) -> str:
        return f"stream-{self.number}"


class Engines:
    """An engine that drains with a stream in flight, and another one; what the first is asked."""

    def __init__(self, *, revision: str = "1", max_in_flight: int = 1, state: EndpointState = EndpointState.READY):
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.bodies: list[dict[str, str]] = []
        self.status = 202
        self.error: Exception | None = None
        self.streams = [Stream(1)]
        self.registry = Registry(
            lambda: EndpointLoad(max_in_flight, FleetPrefill().new_member()), lambda: None, own_models={"m"}
        )
        self.registry.set_addresses({OLD, Address(OTHER.url, revision=revision)}, state)
        self.registry.set_state(OLD.url, EndpointState.NOT_READY)
        ledger = SimpleNamespace(tickets=lambda url: self.streams if url == OLD.url else ())
        self._ledger = cast(Ledger, ledger)

    async def drain(self, times: int = 1) -> list[str]:
        """The streams that were asked for."""
        migration = self.migration(None)
        for _ in range(times):
            await migration.drains(OLD)
        assert all(path == "http://old/migrate/request" for path, _ in self.asked)
        return [body["request_id"] for body in self.bodies]

    def migration(self, secret: str | None) -> Migration:
        return Migration(self.registry, self._ledger, cast(aiohttp.ClientSession, self), secret)

    @contextlib.asynccontextmanager
    async def post(self, url: str, *, json: dict[str, str], headers: dict[str, str], **_: Any) -> AsyncIterator[Any]:
        if self.error is not None:
            raise self.error
        self.asked.append((url, headers))
        self.bodies.append(json)
        yield SimpleNamespace(status=self.status)


async def test_a_stream_is_asked_for_while_another_engine_can_take_it() -> None:
    assert await Engines().drain() == ["stream-1"]


async def test_with_nothing_in_flight_there_is_nothing_to_ask() -> None:
    engines = Engines()
    engines.streams = []
    assert await engines.drain() == []


@pytest.mark.parametrize(
    "engines",
    [Engines(revision="2"), Engines(max_in_flight=0), Engines(state=EndpointState.NOT_READY)],
    ids=["revision", "room", "state"],
)
async def test_streams_stay_where_no_other_of_its_revision_has_room(engines: Engines) -> None:
    assert await engines.drain() == []


@pytest.mark.parametrize(("num_streams", "num_leaving"), [(1, 1), (2, 2), (3, 2)])
async def test_only_as_many_are_asked_for_as_there_is_room_for(num_streams: int, num_leaving: int) -> None:
    engines = Engines(max_in_flight=2)
    engines.streams = [Stream(number) for number in range(num_streams)]
    assert await engines.drain() == ["stream-0", "stream-1"][:num_leaving]


@pytest.mark.parametrize(("num_running", "num_waiting", "num_leaving"), [(1, 1, 1), (2, 1, 0), (4, 0, 0)])
async def test_what_other_routers_have_there_takes_room(num_running: int, num_waiting: int, num_leaving: int) -> None:
    engines = Engines(max_in_flight=3)
    engines.streams = [Stream(number) for number in range(3)]
    other = next(iter(engines.registry.serving("m")))
    other.load.report(LoadReport(num_running, num_waiting, 0, 0, 0, 0, 0.0, None, (), "i"), 0.0)
    assert len(await engines.drain()) == num_leaving


async def test_one_that_has_not_begun_is_asked_for_when_it_has() -> None:
    engines = Engines(max_in_flight=9)
    engines.streams = [Stream(1, can_move=False), Stream(2)]
    migration = engines.migration(None)
    await migration.drains(OLD)
    engines.streams[0].can_move = True
    await migration.drains(OLD)
    assert [body["request_id"] for body in engines.bodies] == ["stream-2", "stream-1"]


@pytest.mark.parametrize(("status", "num_asked"), [(202, 1), (503, 3)])
async def test_one_is_asked_for_until_its_engine_has_agreed(status: int, num_asked: int) -> None:
    engines = Engines()
    engines.status = status
    assert len(await engines.drain(times=3)) == num_asked


@pytest.mark.parametrize("error", [TimeoutError(), aiohttp.ClientConnectionError("gone")])
async def test_an_engine_that_does_not_answer_is_let_alone(error: Exception) -> None:
    engines = Engines()
    engines.error = error
    assert await engines.drain() == []
