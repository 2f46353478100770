"""What all services that follow engines share."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import zmq
from msgspec.structs import asdict
from tests.router.prefix_index.publisher import Publisher, stored
from tests.router.prefix_index.test_tokens import card

from kvasir_router.config import KvEventPorts
from kvasir_router.dialects.dialect import Prompt
from kvasir_router.endpoints.address import Address
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.prefix_index.subscriber import Context
from kvasir_router.service.following import Following, FollowingFactory
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import Registry
from kvasir_router.service.tokenizer_source import Tokenizers

pytestmark = pytest.mark.anyio
PORTS = KvEventPorts(events=1, replay=2)
TEXT = Prompt(b"def f():", is_token_ids=False, seed=b"", is_text=True)
TOKEN_IDS = Prompt(b"\0" * 64, is_token_ids=True, seed=b"")
Until = Callable[[Callable[[], bool]], Awaitable[None]]


class Gateway:
    """Services that follow one engine each."""

    def __init__(self, client: aiohttp.ClientSession, idle_seconds: float = 600.0, ports: KvEventPorts = PORTS) -> None:
        self.tokenizers = Tokenizers()
        self.context: Context = zmq.Context()
        self.factory = FollowingFactory(ports, 10, client, lambda: 0.0, idle_seconds, self.tokenizers, self.context)
        self.services: list[Following] = []

    def service(self, engine: Any) -> Following:
        registry = Registry(lambda: EndpointLoad(1, FleetPrefill().new_member()), lambda: None)
        approximate = ApproximatePrefixIndex(10, 10.0, 16, 4.0)
        service = self.factory.create(approximate, registry, None, lambda: None)
        service.follow({Address(engine.url)})
        self.services.append(service)
        return service

    async def close(self) -> None:
        for service in self.services:
            await service.close()
        self.factory.close()


@pytest.fixture
def idle_seconds() -> float:
    return 600.0


@pytest.fixture
async def gateway(client: aiohttp.ClientSession, engines: list[Any], idle_seconds: float) -> AsyncIterator[Gateway]:
    for engine in engines:
        engine.tokenizer_card = asdict(card())
    made = Gateway(client, idle_seconds)
    yield made
    await made.close()


async def loaded(service: Following) -> None:
    """Its prompts are tokenised, which they want to be."""
    async with asyncio.timeout(5):
        while (await service.index.key(TEXT)).chains is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def num_asked(engines: list[Any]) -> int:
    return sum(engine.num_tokenizer_requests for engine in engines)


async def test_no_limit_of_zmqs_own_is_met_by_many_ranks(gateway: Gateway) -> None:
    assert gateway.context.get(zmq.MAX_SOCKETS) == gateway.context.get(zmq.SOCKET_LIMIT) > 1023
    gateway.context.socket(zmq.SUB).close()


async def test_services_with_one_tokenizer_share_it_and_an_idle_one_has_none(
    gateway: Gateway, engines: list[Any]
) -> None:
    one, other, idle = [gateway.service(engine) for engine in (*engines, engines[0])]
    await idle.index.key(TOKEN_IDS)
    for service in (one, other):
        await loaded(service)
    assert (len(gateway.tokenizers), num_asked(engines)) == (1, 2)


async def test_another_tokenizer_under_the_same_digest_is_another(gateway: Gateway, engines: list[Any]) -> None:
    engines[1].tokenizer_card["chat_template"] = "another"
    services = [gateway.service(engine) for engine in engines]
    for service in services:
        await loaded(service)
    assert len(gateway.tokenizers) == 2


@pytest.mark.parametrize("idle_seconds", [0.1])
async def test_a_tokenizer_that_nobody_wants_any_more_is_freed_and_loaded_again(
    gateway: Gateway, engine: Any, until: Until
) -> None:
    service = gateway.service(engine)
    for num_loaded in (1, 2):
        await loaded(service)
        assert engine.num_tokenizer_requests == num_loaded
        await until(lambda: len(gateway.tokenizers) == 0)


@pytest.mark.parametrize("idle_seconds", [0.5])
async def test_a_tokenizer_that_is_wanted_again_and_again_stays(
    gateway: Gateway, engine: Any, idle_seconds: float
) -> None:
    service = gateway.service(engine)
    await loaded(service)
    begin = time.monotonic()
    while time.monotonic() < begin + 2 * idle_seconds:
        await loaded(service)
        await asyncio.sleep(0.01)
    assert engine.num_tokenizer_requests == 1


async def test_blocks_are_counted_for_all_services_together(
    client: aiohttp.ClientSession, engines_apart: list[Any], publishers: list[Publisher], until: Until
) -> None:
    gateway = Gateway(client, ports=KvEventPorts(publishers[0].event_port, publishers[0].replay_port))
    services = [gateway.service(engine) for engine in engines_apart]
    for publisher in publishers:
        publisher.publish(*map(stored, "abcdef"))
    await until(lambda: sum(service.feed.index.num_held + service.feed.index.num_refused for service in services) == 12)
    assert sum(service.feed.index.num_held for service in services) == 10
    await gateway.close()
