"""Two routers before the same engine that tell each other what they send there."""

import asyncio
from socket import create_server
from typing import Any

import pytest
from tests.loopback import own_host

from kvasir_router.config import HostPort
from kvasir_router.service.peer_settings import PeerSettings

pytestmark = pytest.mark.anyio
HOSTS = (own_host(1), own_host(2))
PROMPT = {"model": "tiny", "prompt": "once upon a time " * 40, "stream": True}


@pytest.fixture
def hosts() -> set[str]:
    """That the name of all routers stands for."""
    return set(HOSTS)


@pytest.fixture
async def routers(engine: Any, start_router: Any, client: Any, hosts: set[str]) -> list[Any]:
    """On hosts of their own, as pods are, so that they can publish on the same port. They hear each other."""
    with create_server((HOSTS[0], 0)) as free:
        peers = HostPort("routers", free.getsockname()[1])

    async def resolve(where: HostPort) -> set[str]:
        return {f"tcp://{host}:{where.port}" for host in hosts}

    settings = PeerSettings(heartbeat_seconds=0.05, lifetime_seconds=0.5, resolve_seconds=0.01, resolve=resolve)
    options = {"peers": peers, "router_secret": "secret", "tuned": {"peers": settings}}
    started = [await start_router(engine, host=host, **options) for host in HOSTS]
    async with asyncio.timeout(10):
        for router in started:
            while "kvasir_router_peers 1.0" not in await metrics_of(router, client):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    return started


async def metrics_of(router: Any, client: Any) -> str:
    async with client.get(router.admin_url + "/metrics") as response:
        text: str = await response.text()
        return text


def load_at(router: Any, engine: Any) -> Any:
    return router.services.of(None).registry.get(engine.url).load


async def ask(router: Any, client: Any) -> None:
    async with client.post(router.url + "/v1/completions", json=PROMPT) as response:
        assert response.status == 200
        await response.read()


async def test_each_counts_what_the_other_has_sent_until_its_end(
    routers: list[Any], engine: Any, client: Any, until: Any
) -> None:
    engine.gate.clear()
    own, heard = (load_at(router, engine) for router in routers)
    asking = asyncio.create_task(ask(routers[0], client))
    await until(lambda: heard.prefill_tokens > 0)
    assert heard.prefill_tokens == own.prefill_tokens > 100
    assert (own.num_in_flight, heard.num_in_flight) == (1, 0)
    engine.gate.set()
    await asking
    await until(lambda: heard.prefill_tokens == heard.resident_tokens == 0)
    assert heard.prefill.num_observations == own.prefill.num_observations == 1


async def test_what_a_lost_router_has_told_is_forgotten(
    routers: list[Any], engine: Any, client: Any, until: Any, hosts: set[str]
) -> None:
    """It is not heard any more, though its stream goes on."""
    engine.gate.clear()
    heard = load_at(routers[1], engine)
    asking = asyncio.create_task(ask(routers[0], client))
    await until(lambda: heard.prefill_tokens > 0)
    hosts.remove(HOSTS[0])
    await until(lambda: heard.prefill_tokens == 0)
    engine.gate.set()
    await asking
