"""Engines that answer with errors: who is asked less, who not at all, and what a client sees of it."""

import asyncio
import re
import time
from email.utils import formatdate
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.router.parts import Clock

from kvasir_router.config import RouterConfig
from kvasir_router.server import running

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
ODD_DATE = ("Mon, 1 Jan 99999999999999 00:00:00 GMT", 1)
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def ask(client: aiohttp.ClientSession, router: Any) -> int:
    async with client.post(router.url + CHAT, json=BODY) as response:
        await response.read()
        return response.status


def limits_of(router: Any) -> Any:
    (service,) = router.services
    return service.in_flight_limits


def registry_of(router: Any) -> Any:
    (service,) = router.services
    return service.registry


async def test_an_engine_that_fails_at_once_does_not_draw_the_traffic(
    engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    engines[0].status = 500
    statuses = [await ask(client, router) for _ in range(40)]
    assert statuses.count(500) <= 2
    assert statuses.count(200) >= 38


async def test_an_engine_that_fails_again_and_again_is_ejected_and_comes_back_by_trials(
    engines: Any, start_router: Any, client: Any, until: Any
) -> None:
    clock = Clock()
    router = await start_router(*engines, policy="roundRobin", tuned={"clock": clock, "refresh_seconds": 0.01})
    engines[0].status = 500
    statuses = []
    for _ in range(30):
        statuses.append(await ask(client, router))
        if not limits_of(router).num_ejected:
            clock.seconds_ahead += 40.0  # it is no suspect any more
    assert (statuses.count(500), limits_of(router).num_ejected) == (5, 1)
    engines[0].status = 200
    clock.seconds_ahead += 40.0
    await until(lambda: limits_of(router).circuit(engines[0].url) == "half_open")
    assert [await ask(client, router) for _ in range(10)] == [200] * 10
    assert limits_of(router).num_ejected == 0


async def test_a_lone_engine_is_never_ejected(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    engine.status = 500
    assert [await ask(client, router) for _ in range(20)] == [500] * 20


async def test_half_of_the_engines_serve_on_where_all_fail(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines, policy="roundRobin")
    for engine in engines:
        engine.status = 500
    assert [await ask(client, router) for _ in range(30)] == [500] * 30
    assert limits_of(router).num_ejected == 1


@pytest.mark.parametrize(("status", "is_ejected"), [(429, False), (401, True), (403, True), (404, True), (405, True)])
async def test_an_engine_that_refuses_at_once_does_not_draw_the_traffic(
    status: int, is_ejected: bool, engines: Any, start_router: Any, client: Any
) -> None:
    """It is idle, and so the cheapest to send to. Beside others that answer, 429 says that it is full, and the rest
    that something is wrong with it."""
    clock = Clock()
    router = await start_router(*engines, policy="roundRobin", tuned={"clock": clock, "refresh_seconds": 0.01})
    engines[0].status, engines[0].retry_after = status, "5"
    assert [await ask(client, router) for _ in range(30)] == [200] * 30
    assert len(engines[0].requests) <= 2
    for _ in range(30):
        clock.seconds_ahead += 40.0  # it is no suspect any more
        assert await ask(client, router) == 200
        if limits_of(router).num_ejected:
            break
    assert (limits_of(router).num_ejected == 1) is is_ejected


@pytest.mark.parametrize("status", [401, 403, 404, 405, 429])
async def test_what_all_engines_refuse_is_the_requests_fault_and_relayed(
    status: int, engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    for engine in engines:
        engine.status = status
    assert [await ask(client, router) for _ in range(20)] == [status] * 20
    assert limits_of(router).num_ejected == 0


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [(None, 1), ("0", 1), ("7", 7), ("999", 30), ("9" * 30, 30), ("soon", 1), ("-5", 1), ODD_DATE],
)
async def test_a_busy_engine_is_passed_over_for_as_long_as_it_says_within_bounds(
    retry_after: str | None, seconds: float, engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, policy="roundRobin", tuned={"clock": lambda: 100.0})
    engines[0].status, engines[0].retry_after = 429, retry_after
    assert [await ask(client, router) for _ in range(2)] == [200, 200]
    until = {each.url: each.suspect_until for each in registry_of(router)}
    assert until == {engines[0].url: 100.0 + seconds, engines[1].url: 0.0}


@pytest.mark.parametrize(("away", "least", "most"), [(12, 11, 12), (900, 30, 30), (-900, 1, 1), (1e11, 30, 30)])
async def test_a_busy_engine_that_names_a_date_is_passed_over_until_then(
    away: float, least: float, most: float, engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, policy="roundRobin", tuned={"clock": lambda: 100.0})
    engines[0].status, engines[0].retry_after = 429, formatdate(time.time() + away, usegmt=True)
    assert [await ask(client, router) for _ in range(2)] == [200, 200]
    until = max(each.suspect_until for each in registry_of(router))
    assert 100.0 + least <= until <= 100.0 + most


@pytest.mark.parametrize("status", [401, 404, 429])
async def test_an_engine_whose_refusal_is_relayed_does_not_draw_the_traffic_either(
    status: int, engines: Any, start_router: Any, client: Any
) -> None:
    """Where no request is sent twice."""
    router = await start_router(*engines, retries=0, tuned={"clock": Clock()})
    engines[0].status = status
    statuses = [await ask(client, router) for _ in range(40)]
    assert statuses.count(status) <= 2
    assert limits_of(router).num_ejected == 0


async def test_an_engine_that_drains_is_passed_over_and_not_ejected(
    engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, policy="roundRobin")
    engines[0].status, engines[0].retry_after = 503, "5"
    assert [await ask(client, router) for _ in range(30)] == [200] * 30
    assert limits_of(router).num_ejected == 0
    assert len(engines[0].requests) <= 3


async def test_engines_that_all_fail_are_not_asked_several_times_as_often(
    engines: Any, start_router: Any, client: Any
) -> None:
    """Beside a hundred requests that may always be repeated."""
    router = await start_router(*engines)
    for engine in engines:
        engine.die_before_headers = True
    begin = time.perf_counter()
    statuses = await asyncio.gather(*(ask(client, router) for _ in range(200)))
    most = 100 + 0.2 * 200 + 10 * (time.perf_counter() - begin)
    assert set(statuses) == {502}
    num_repeated = sum(len(engine.requests) for engine in engines) - 200
    assert 100 <= num_repeated <= most
    async with client.get(router.admin_url + "/metrics") as response:
        refused = re.search(r"^kvasir_router_retries_refused_total (\S+)", await response.text(), re.MULTILINE)
    assert refused is not None
    assert float(refused[1]) >= 200 - num_repeated


async def test_ejected_engines_are_told_of(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines)
    for _ in range(5):
        limits_of(router).answered(engines[0].url, is_error=True)
    async with client.get(router.admin_url + "/endpoints") as response:
        described = {one["url"]: one for one in await response.json()}
    assert (described[engines[0].url]["circuit"], described[engines[0].url]["max_in_flight"]) == ("open", 0)
    async with client.get(router.admin_url + "/metrics") as response:
        assert "kvasir_router_ejected_endpoints 1.0" in await response.text()


class ForeignEngine:
    """One of another make: no /ready, perhaps a /health."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self._runner = web.AppRunner(self._app())

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{name:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        name = request.match_info["name"].rsplit("/")[-1]
        return web.json_response({"data": [{"id": "tiny"}]}, status=self.statuses.get(name, 404))


@pytest.mark.parametrize(
    ("statuses", "state"),
    [
        ({"health": 200}, "ready"),
        ({"health": 503, "models": 200}, "unreachable"),
        ({"models": 200}, "ready"),
        ({}, "not_ready"),
        ({"health": 401, "models": 200}, "not_ready"),
    ],
)
async def test_an_engine_of_another_make_is_ready_by_its_health(
    statuses: dict[str, int], state: str, until: Any
) -> None:
    async with ForeignEngine(**statuses) as url:
        config = RouterConfig(port=0, admin_port=0, endpoint=(url,), model="tiny", probe_interval=0.05)
        async with running(config) as router:
            (service,) = router.services
            await until(lambda: service.registry.state_of(url) not in (None, "unknown"))
            assert service.registry.state_of(url) == state
