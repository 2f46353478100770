"""What all services that follow engines share."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
import pytest
import zmq
from msgspec.structs import asdict
from tests.router.prefix_index.test_tokens import card

from kvasir_router.config import KvEventPorts
from kvasir_router.dialects.dialect import Prompt
from kvasir_router.endpoints.address import Address
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.service.following import Following, FollowingFactory
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import Registry

pytestmark = pytest.mark.anyio
PORTS = KvEventPorts(events=1, replay=2)
TEXT = Prompt(b"def f():", is_token_ids=False, seed=b"", is_text=True)
TOKEN_IDS = Prompt(b"\0" * 64, is_token_ids=True, seed=b"")
Until = Callable[[Callable[[], bool]], Awaitable[None]]


class Gateway:
    """Services that follow one engine each, one that has gone idle after `idle_seconds`."""

    def __init__(self, client: aiohttp.ClientSession, idle_seconds: float) -> None:
        self.factory = FollowingFactory(PORTS, 10, client, lambda: 0.0, idle_seconds)
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
async def gateway(client: aiohttp.ClientSession, engines: list[Any]) -> AsyncIterator[Gateway]:
    for engine in engines:
        engine.tokenizer_card = asdict(card())
    made = Gateway(client, idle_seconds=600.0)
    yield made
    await made.close()


def tokenizer_of(service: Following) -> Any:
    return service.index._tokenizer


def is_loaded(service: Following) -> bool:
    return tokenizer_of(service) is not None


def is_wanted_and_loaded(service: Following) -> bool:
    service._tokenizers.want()
    return is_loaded(service)


async def test_no_limit_of_zmqs_own_is_met_by_many_ranks(gateway: Gateway) -> None:
    context = gateway.factory._context
    assert context.get(zmq.MAX_SOCKETS) == context.get(zmq.SOCKET_LIMIT) > 1023
    context.socket(zmq.SUB).close()


async def test_services_with_one_tokenizer_share_it_and_an_idle_one_has_none(
    gateway: Gateway, engines: list[Any], until: Until
) -> None:
    one, other, idle = [gateway.service(engine) for engine in (*engines, engines[0])]
    await idle.index.key(TOKEN_IDS)
    for service in (one, other):
        await service.index.key(TEXT)
        await until(partial(is_loaded, service))
    assert tokenizer_of(one) is tokenizer_of(other)
    assert (tokenizer_of(idle), sum(engine.num_tokenizer_requests for engine in engines)) == (None, 2)


async def test_another_tokenizer_under_the_same_digest_is_another(
    gateway: Gateway, engines: list[Any], until: Until
) -> None:
    engines[1].tokenizer_card["chat_template"] = "another"
    services = [gateway.service(engine) for engine in engines]
    for service in services:
        await service.index.key(TEXT)
        await until(partial(is_loaded, service))
    assert tokenizer_of(services[0]) is not tokenizer_of(services[1])


async def test_a_tokenizer_that_nobody_wants_any_more_is_freed_and_loaded_again(
    client: aiohttp.ClientSession, engine: Any, until: Until
) -> None:
    engine.tokenizer_card = asdict(card())
    gateway = Gateway(client, idle_seconds=0.2)
    service = gateway.service(engine)
    for num_loaded in (1, 2):
        await until(lambda: is_wanted_and_loaded(service))
        assert engine.num_tokenizer_requests == num_loaded
        await until(lambda: tokenizer_of(service) is None and len(gateway.factory._tokenizers) == 0)
    await gateway.close()


async def test_a_tokenizer_that_is_wanted_all_the_time_stays(
    client: aiohttp.ClientSession, engine: Any, until: Until
) -> None:
    engine.tokenizer_card = asdict(card())
    gateway = Gateway(client, idle_seconds=0.3)
    service = gateway.service(engine)
    await until(lambda: is_wanted_and_loaded(service))
    timer = service._tokenizers._idle_timer
    await until(lambda: is_wanted_and_loaded(service) and service._tokenizers._idle_timer is not timer)
    assert engine.num_tokenizer_requests == 1
    await gateway.close()


async def test_blocks_are_counted_for_all_services_together(gateway: Gateway, engines: list[Any]) -> None:
    one, other = map(gateway.service, engines)
    assert one.index._precise._budget is other.index._precise._budget
