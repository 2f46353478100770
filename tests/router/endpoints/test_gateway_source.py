"""Which services a gateway hears of, and with which addresses, as their manifests and slices come and go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.router.kube_objects import ObjectStore, engine_slice, manifest

from kvasir_router.endpoints.gateway_source import GatewaySource, ScopeApi, ServedService
from kvasir_router.endpoints.objects import KubernetesObject, ObjectKey

pytestmark = pytest.mark.anyio
Until = Callable[[Callable[[], bool]], Awaitable[None]]
LLAMA = ("models", "llama")


class Heard:
    """What a source has published, service by service."""

    def __init__(self, *scopes: ScopeApi) -> None:
        self.source = GatewaySource(scopes, retry_seconds=0.001)
        self.served: dict[ObjectKey, ServedService | None] = {}
        self.num_publications = 0

    def publish(self, changed: Any) -> None:
        self.num_publications += 1
        self.served |= changed

    def urls(self, key: ObjectKey = LLAMA) -> list[str]:
        served = self.served.get(key)
        return sorted(address.url for address in served.addresses) if served is not None else []

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.source.run(self.publish))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_a_service_is_heard_of_with_its_engines_whichever_comes_first(until: Until) -> None:
    for is_service_first in (True, False):
        services, slices = ObjectStore(), ObjectStore()
        heard = Heard(ScopeApi(services, slices))
        async with heard.following():
            await until(lambda heard=heard: heard.source.is_synced)  # type: ignore[misc]
            one, two = services.apply(manifest("llama")), slices.apply(engine_slice("llama", 8000))
            for change in (one, two) if is_service_first else (two, one):
                await change
            await until(lambda heard=heard: heard.urls() == ["http://127.0.0.1:8000"])  # type: ignore[misc]


async def test_slices_of_another_service_change_nothing_of_this_one(until: Until) -> None:
    services, slices = ObjectStore(manifest("llama")), ObjectStore(engine_slice("llama", 8000))
    heard = Heard(ScopeApi(services, slices))
    async with heard.following():
        await until(lambda: bool(heard.urls()))
        heard.served.clear()
        await slices.apply(engine_slice("qwen", 8001))
        await until(lambda: bool(heard.served))
    assert heard.served == {("models", "qwen"): None}


async def test_slices_of_the_same_name_elsewhere_are_another_services(until: Until) -> None:
    services = ObjectStore(manifest("llama"), manifest("llama", namespace="others"))
    slices = ObjectStore(engine_slice("llama", 8000), engine_slice("llama", 8001, namespace="others"))
    heard = Heard(ScopeApi(services, slices))
    async with heard.following():
        await until(lambda: bool(heard.urls() and heard.urls(("others", "llama"))))
    assert heard.urls() == ["http://127.0.0.1:8000"]
    assert heard.urls(("others", "llama")) == ["http://127.0.0.1:8001"]


async def test_all_slices_of_a_service_count_until_they_are_gone(until: Until) -> None:
    services, slices = ObjectStore(manifest("llama")), ObjectStore(engine_slice("llama", 8000))
    heard = Heard(ScopeApi(services, slices))
    more = engine_slice("llama", 8001, name="more")
    async with heard.following():
        await slices.apply(more)
        await until(lambda: len(heard.urls()) == 2)
        await slices.delete(more)
        await until(lambda: heard.urls() == ["http://127.0.0.1:8000"])


async def test_a_service_that_is_gone_or_no_longer_the_gateways_is_said_to_be_none(until: Until) -> None:
    services, slices = ObjectStore(manifest("llama"), manifest("qwen")), ObjectStore()
    heard = Heard(ScopeApi(services, slices))
    async with heard.following():
        await until(lambda: len(heard.served) == 2)
        await services.delete(manifest("llama"))
        await services.apply(manifest("qwen", mode="dedicated"))
        await until(lambda: set(heard.served.values()) == {None})


async def test_it_is_synced_once_both_kinds_of_every_namespace_have_been_listed(until: Until) -> None:
    gates = [Gate() for _ in range(4)]
    heard = Heard(ScopeApi(gates[0], gates[1]), ScopeApi(gates[2], gates[3]))
    async with heard.following():
        for gate in gates:
            await asyncio.sleep(0.01)
            assert not heard.source.is_synced
            gate.opened.set()
        await until(lambda: heard.source.is_synced)


class Gate(ObjectStore):
    """Lists once it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()

    async def list(self) -> tuple[list[KubernetesObject], str]:
        await self.opened.wait()
        return await super().list()
