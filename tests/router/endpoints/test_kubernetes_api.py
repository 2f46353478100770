"""The Kubernetes client library against an API server's wire format on a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client

from kvasir_router.endpoints.kubernetes import ServiceReference
from kvasir_router.endpoints.kubernetes_api import KubernetesApi, KubernetesObjects
from kvasir_router.endpoints.reflector import ResourceExpiredError, WatchFailedError

pytestmark = pytest.mark.anyio
PATH = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
SLICE = {
    "metadata": {"name": "s", "resourceVersion": "5"},
    "endpoints": [{"addresses": [f"10.0.0.{n}" for n in range(99)]}],
}


class FakeApiServer:
    def __init__(self) -> None:
        self.status = 200
        self.events: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.queries: list[dict[str, str]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.queries.append(dict(request.query))
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        if "watch" in request.query:
            return web.Response(body=b"".join(json.dumps(event).encode() + b"\n" for event in self.events))
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": [SLICE]})


@pytest.fixture
async def server(exit_stack: Any) -> tuple[FakeApiServer, str]:
    fake, app = FakeApiServer(), web.Application()
    app.router.add_get("/{path:.*}", fake.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    exit_stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return fake, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def api(server: tuple[FakeApiServer, str]) -> AsyncIterator[KubernetesObjects]:
    async with client.ApiClient(client.Configuration(host=server[1])) as api_client:
        yield KubernetesApi(api_client).slices_of(ServiceReference("models", "llama", "8000"))


async def test_lists_the_slices_of_the_services_engines_by_label(server: Any, api: KubernetesObjects) -> None:
    assert await api.list() == ([SLICE], "7")
    selector = "serving.kvasir.dev/service=llama,serving.kvasir.dev/role notin (router)"
    assert server[0].paths == [PATH]
    assert server[0].queries == [{"labelSelector": selector}]


@pytest.mark.parametrize(("namespace", "scope"), [("models", "namespaces/models/"), (None, "")])
async def test_a_gateway_lists_all_engines_slices_and_all_services(
    server: Any, namespace: str | None, scope: str
) -> None:
    async with client.ApiClient(client.Configuration(host=server[1])) as api_client:
        api = KubernetesApi(api_client)
        for objects in (api.slices(namespace), api.inference_services(namespace)):
            assert await objects.list() == ([SLICE], "7")
    assert server[0].paths == [
        f"/apis/discovery.k8s.io/v1/{scope}endpointslices",
        f"/apis/serving.kvasir.dev/v1alpha1/{scope}inferenceservices",
    ]
    selector = "serving.kvasir.dev/service,serving.kvasir.dev/role notin (router)"
    assert server[0].queries == [{"labelSelector": selector}, {}]


async def test_what_concerns_only_writers_is_not_kept(server: Any, api: KubernetesObjects) -> None:
    managed = {**SLICE, "metadata": {**SLICE["metadata"], "managedFields": [{"manager": "someone"}]}}
    server[0].events = [{"type": "MODIFIED", "object": managed}]
    async with aclosing(api.watch("7")) as events:
        assert [event async for event in events] == [{"type": "MODIFIED", "object": SLICE}]


async def test_watches_from_a_version(server: Any, api: KubernetesObjects) -> None:
    server[0].events = [{"type": "MODIFIED", "object": SLICE}] * 300
    async with aclosing(api.watch("7")) as events:
        assert [event async for event in events] == server[0].events
    query = server[0].queries[0]
    assert (query["watch"], query["resourceVersion"]) == ("true", "7")


async def test_a_watch_is_waited_for_longer_than_the_server_may_be_silent() -> None:
    """The server ends a watch by itself; only one that does not, or whose node has vanished, is given up."""
    asked: list[dict[str, Any]] = []

    async def read(**options: Any) -> Any:
        asked.append(options)
        raise WatchFailedError("no server")

    with pytest.raises(WatchFailedError):
        await anext(KubernetesObjects(read, {}).watch("7"))
    assert asked[0]["timeout_seconds"] < asked[0]["_request_timeout"] < asked[0]["timeout_seconds"] + 60


async def test_a_watch_that_goes_silent_has_failed() -> None:
    """As behind a load balancer that forgot the connection: nothing comes, and nothing ends it."""
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}}

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(3):
            await response.write(json.dumps(bookmark).encode() + b"\n")
        await asyncio.Event().wait()
        return response

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as running, aiohttp.ClientSession() as session:

        async def read(**options: Any) -> aiohttp.ClientResponse:
            return await session.get(running.make_url("/"))

        async with aclosing(KubernetesObjects(read, {}, silent_seconds=0.3).watch("7")) as events:
            assert [await anext(events) for _ in range(3)] == [bookmark] * 3
            with pytest.raises(WatchFailedError, match="silent for"):
                await anext(events)


async def test_an_expired_version_is_told_apart(server: Any, api: KubernetesObjects) -> None:
    server[0].events = [{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}]
    async with aclosing(api.watch("1")) as events:
        with pytest.raises(ResourceExpiredError):
            await anext(events)


@pytest.mark.parametrize(
    "body", ["<html>sign in</html>", "null", "[]", '{"items": []}', '{"items": 5, "metadata": {}}']
)
async def test_an_answer_in_the_api_servers_place_is_a_failed_call(body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body + "\n")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as running, aiohttp.ClientSession() as session:

        async def read(**options: Any) -> aiohttp.ClientResponse:
            return await session.get(running.make_url("/"))

        with pytest.raises(WatchFailedError, match="none of its objects"):
            await KubernetesObjects(read, {}).list()
        with pytest.raises(WatchFailedError, match="none of its objects"):
            await anext(KubernetesObjects(read, {}).watch("7"))


async def test_a_refused_call_says_what_the_server_said(server: Any, api: KubernetesObjects) -> None:
    server[0].status = 403
    with pytest.raises(WatchFailedError, match="answered 403"):
        await api.list()
