"""What a gateway of this machine follows in place of a cluster, read as it reads it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from kvasir_operator.api.model import InferenceService
from kvasir_operator.local.gateway_api import SERVICES_PATH, SLICES_PATH, GatewayApi
from kvasir_operator.local.network import free_port
from kvasir_operator.local.pods import Listener, LocalPod, LocalProbe

MakeService = Callable[..., InferenceService]
PROBE = LocalProbe("http://127.0.0.1", 1, 1)


def engine(name: str, port: int = 8000) -> LocalPod:
    return LocalPod(name, "serve", (), {}, (Listener("127.77.0.1", port),), PROBE, PROBE, 1.0, name)


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def list(self, path: str) -> dict[str, Any]:
        async with self._session.get(f"{self._url}{path}") as answer:
            listed: dict[str, Any] = await answer.json()
            return listed

    @asynccontextmanager
    async def watching(self, path: str, version: str) -> AsyncIterator[aiohttp.StreamReader]:
        query = {"watch": "True", "resourceVersion": version, "allowWatchBookmarks": "True"}
        async with self._session.get(f"{self._url}{path}", params=query) as answer:
            yield answer.content


@asynccontextmanager
async def served(api: GatewayApi) -> AsyncIterator[Client]:
    listener = Listener("127.0.0.1", free_port("127.0.0.1"))
    async with api.serving(listener), aiohttp.ClientSession() as session:
        yield Client(session, listener.url)


def test_services_are_listed_with_what_the_gateway_reads_of_them(make_service: MakeService) -> None:
    adapters = {"list": [{"name": "sql", "source": "file:///sql"}]}
    one = make_service(
        model={"source": "file:///m", "name": "big", "aliases": ["b"]},
        engine={"adapters": adapters},
        router={"mode": "gateway", "policy": "sessionAffinity"},
    )

    async def body() -> None:
        async with served(GatewayApi([one])) as client:
            listed = await client.list(SERVICES_PATH)
        [item] = listed["items"]
        assert (item["metadata"]["namespace"], item["metadata"]["name"]) == ("models", "llama")
        assert item["spec"] == {
            "model": {"name": "big", "aliases": ["b"]},
            "engine": {"adapters": adapters},
            "router": {"mode": "gateway", "policy": "sessionAffinity", "maxQueueSize": 1000, "maxQueueWait": "60s"},
        }

    asyncio.run(asyncio.wait_for(body(), 10))


def test_an_engine_is_known_from_its_readiness_on_by_list_and_by_watch() -> None:
    async def body() -> None:
        api = GatewayApi([])
        async with served(api) as client:
            before = await client.list(SLICES_PATH)
            assert before["items"] == []
            async with client.watching(SLICES_PATH, before["metadata"]["resourceVersion"]) as events:
                for number, name in enumerate(("a", "b")):
                    api.report_ready("models", "llama", engine(name, 8000 + number))
                    event = json.loads(await events.readline())
                    assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", name)
            assert [item["metadata"]["name"] for item in (await client.list(SLICES_PATH))["items"]] == ["a", "b"]

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_watch_goes_on_from_its_version() -> None:
    async def body() -> None:
        api = GatewayApi([])
        api.report_ready("models", "llama", engine("a"))
        async with served(api) as client:
            version = (await client.list(SLICES_PATH))["metadata"]["resourceVersion"]
            api.report_ready("models", "llama", engine("b"))
            async with client.watching(SLICES_PATH, version) as events:
                assert json.loads(await events.readline())["object"]["metadata"]["name"] == "b"

    asyncio.run(asyncio.wait_for(body(), 10))


def test_an_engine_is_found_by_the_label_and_the_port_that_it_has_in_a_cluster() -> None:
    async def body() -> None:
        api = GatewayApi([])
        api.report_ready("models", "llama", engine("a", 8123))
        async with served(api) as client:
            [item] = (await client.list(SLICES_PATH))["items"]
        assert item["metadata"]["labels"]["serving.kvasir.dev/service"] == "llama"
        assert item["metadata"]["labels"]["serving.kvasir.dev/role"] == "serve"
        assert (item["ports"], item["endpoints"][0]["addresses"]) == ([{"name": "http", "port": 8123}], ["127.77.0.1"])

    asyncio.run(asyncio.wait_for(body(), 10))
