"""What the client's owner hears of its requests; the rest is tested against a real API server."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

from kvasir_operator.errors import KubeUnavailableError, LeadershipLostError, ObjectNotFoundError, ObjectRefusedError
from kvasir_operator.kube.client import ClientHooks, KubeClient
from kvasir_operator.kube.kinds import POD_MONITOR, SERVICE, Kind

from .http_api import Answer, answering, http_api, refusal


def sent(kind: Kind, hooks: ClientHooks, answer: Answer) -> list[tuple[str, str]]:
    """What reached the API server of one write, whatever came of it but a lost lead."""

    async def body() -> list[tuple[str, str]]:
        async with http_api(answer) as api:
            kube = KubeClient(api.configuration, hooks)
            metadata = {"name": "llama", "namespace": "models"}
            try:
                with suppress(ObjectRefusedError, ObjectNotFoundError):
                    await kube.apply({"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata})
                return api.asked
            finally:
                await kube.close()

    return asyncio.run(body())


async def refuse(request: web.Request) -> web.Response:
    return refusal(422, "no")


async def know_no_such_kind(request: web.Request) -> web.Response:
    return web.Response(status=404, text="404 page not found")


@pytest.mark.parametrize("ahead", [-70, 0, 20, 3600])
def test_its_time_is_that_of_the_api_server(ahead: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        date = datetime.now(UTC) + timedelta(seconds=ahead)
        return web.json_response({"metadata": {}}, headers={"Date": format_datetime(date, usegmt=True)})

    async def seconds_ahead() -> float:
        async with http_api(answer) as api:
            kube = KubeClient(api.configuration)
            try:
                await kube.get(SERVICE, "models", "llama")
                return (datetime.fromisoformat(kube.now()) - datetime.now(UTC)).total_seconds()
            finally:
                await kube.close()

    assert abs(asyncio.run(seconds_ahead()) - ahead) <= 2.5


def test_a_write_that_its_hook_forbids_is_not_sent() -> None:
    def forbid() -> None:
        raise LeadershipLostError("another leads")

    reached: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        reached.append(1)
        return web.json_response({})

    with pytest.raises(LeadershipLostError):
        sent(SERVICE, ClientHooks(before_write=forbid), answer)
    assert reached == []


def test_every_request_is_told_of_with_what_came_of_it() -> None:
    told: list[tuple[str, str, type[Exception] | None]] = []
    hooks = ClientHooks(on_request=lambda verb, kind, error: told.append((verb, kind, type(error) if error else None)))
    assert sent(SERVICE, hooks, refuse) == [("PATCH", "llama")]
    sent(SERVICE, hooks, answering({}))
    assert told == [("apply", "Service", ObjectRefusedError), ("apply", "Service", None)]


@pytest.mark.parametrize(("kind", "num_reports"), [(POD_MONITOR, 1), (SERVICE, 0)])
def test_an_optional_kind_that_is_not_known_is_reported(kind: Kind, num_reports: int) -> None:
    reports: list[int] = []
    sent(kind, ClientHooks(on_kind_not_served=lambda: reports.append(1)), know_no_such_kind)
    assert len(reports) == num_reports


def test_a_watch_that_breaks_off_is_reported_after_what_it_has_told() -> None:
    async def answer(request: web.Request) -> web.Response:
        response = web.Response()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b'{"type": "BOOKMARK", "object": {}}\n')
        assert request.transport is not None
        request.transport.close()
        return response

    async def body() -> None:
        async with http_api(answer) as api:
            kube = KubeClient(api.configuration)
            try:
                watch = kube.watch(SERVICE, None, {}, "1", 60.0)
                assert await anext(watch) == {"type": "BOOKMARK", "object": {}}
                with pytest.raises(KubeUnavailableError, match="did not answer"):
                    await anext(watch)
            finally:
                await kube.close()

    asyncio.run(body())


def test_a_list_goes_on_where_each_page_ends() -> None:
    queries: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        queries.append(dict(request.query))
        token = "" if "continue" in request.query else "next"
        item = {"metadata": {"name": token or "last"}}
        return web.json_response({"metadata": {"resourceVersion": "1", "continue": token}, "items": [item]})

    async def body() -> list[str]:
        async with http_api(answer) as api:
            kube = KubeClient(api.configuration, page_size=1)
            try:
                found = await kube.list(SERVICE, "models", {"app": None}, "metadata.name=a")
                return [each["metadata"]["name"] for each in found]
            finally:
                await kube.close()

    asked = {"limit": "1", "labelSelector": "app", "fieldSelector": "metadata.name=a"}
    assert asyncio.run(body()) == ["next", "last"]
    assert queries == [asked, {**asked, "continue": "next"}]
