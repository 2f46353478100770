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
    """Services that follow one engine each."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self.factory = FollowingFactory(PORTS, 10, client, lambda: 0.0, tokenizer_idle_seconds=600.0)
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
    made = Gateway(client)
    yield made
    await made.close()


def tokenizer_of(service: Following) -> Any:
    return service.index._tokenizer


def is_loaded(service: Following) -> bool:
    return tokenizer_of(service) is not None


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
    gateway: Gateway, engine: Any, until: Until
) -> None:
    service = gateway.service(engine)
    source = service._tokenizers
    for num_loaded in (1, 2):
        await service.index.key(TEXT)
        await until(partial(is_loaded, service))
        assert engine.num_tokenizer_requests == num_loaded
        source._last_wanted -= 600.0
        source._drop_if_idle()
        assert not is_loaded(service)
        await until(lambda: len(gateway.factory._tokenizers) == 0)  # the thread that has loaded it may still hold it


async def test_a_tokenizer_that_was_wanted_again_stays(gateway: Gateway, engine: Any, until: Until) -> None:
    service = gateway.service(engine)
    source = service._tokenizers
    await service.index.key(TEXT)
    await until(partial(is_loaded, service))
    source._last_wanted -= 600.0
    await service.index.key(TEXT)
    source._drop_if_idle()
    assert is_loaded(service)


async def test_blocks_are_counted_for_all_services_together(gateway: Gateway, engines: list[Any]) -> None:
    one, other = map(gateway.service, engines)
    assert one.index._precise._budget is other.index._precise._budget
