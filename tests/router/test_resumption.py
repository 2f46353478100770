"""A stream whose engine is lost goes on at another, and its client sees one unbroken stream."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from kvasir_router.relay.journal import JournalBounds

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
def engines(engines: Any) -> Any:
    """Two that keep journals and give the same tokens; requests begin at the first."""
    for engine in engines:
        engine.keeps_journal, engine.num_tokens, engine.token_seconds = True, 8, 0.002
    return sorted(engines, key=lambda engine: engine.url)  # the order in which equals are picked


@pytest.fixture
async def three_engines(engines: Any, exit_stack: AsyncExitStack) -> Any:
    """With one more like these."""
    third = type(engines[0])("three")
    third.keeps_journal, third.num_tokens = True, 8
    await third.start()
    exit_stack.push_async_callback(third.stop)
    return sorted([*engines, third], key=lambda engine: engine.url)


@pytest.fixture
def whole(engines: Any) -> bytes:
    return bytes(engines[0].stream_bytes(8) + b"data: [DONE]\n\n")


async def stream(client: aiohttp.ClientSession, router: Any) -> bytes:
    async with client.post(router.url + CHAT, json=BODY) as response:
        assert response.status == 200
        assert "x-kvasir-resumable" not in response.headers
        return await response.read()


async def metrics(client: aiohttp.ClientSession, router: Any) -> str:
    async with client.get(router.admin_url + "/metrics") as response:
        return await response.text()


async def test_the_client_gets_the_bytes_that_it_would_get_without_a_journal(
    engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(engines[0])
    assert await stream(client, router) == whole
    async with client.post(engines[0].url + CHAT, json=BODY) as response:
        assert await response.read() == whole


@pytest.mark.parametrize("num_tokens", range(1, 8))
async def test_a_stream_goes_on_at_another_engine(
    num_tokens: int, engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    engines[0].die_after_tokens = num_tokens
    assert await stream(client, router) == whole
    journal = b"".join(b"[%d]\n" % number for number in range(num_tokens))
    assert [engine.journals for engine in engines] == [[b""], [journal]]


async def test_who_goes_on_with_a_stream_teaches_how_fast_it_prefills(
    engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    engines[0].die_after_tokens = 3
    assert await stream(client, router) == whole
    described = {one["url"]: one["num_prefill_observations"] for one in router.services.describe()}
    assert described == {engine.url: 1 for engine in engines}


@pytest.mark.parametrize("num_tokens", [3, 4])
async def test_a_stream_goes_on_with_exactly_as_long_a_journal_as_is_kept(
    num_tokens: int, engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    bounds = JournalBounds(max_bytes=len(b"[0]\n[1]\n[2]\n"))
    router = await start_router(*engines, tuned={"journal": bounds})
    engines[0].die_after_tokens = num_tokens
    body = await stream(client, router)
    assert (body == whole, b"stream_interrupted" in body) == ((True, False) if num_tokens == 3 else (False, True))


@pytest.mark.parametrize("num_tokens", [3, 4])
async def test_a_stream_goes_on_if_the_budget_of_bodies_has_room_for_its_journal(
    num_tokens: int, engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    num_bytes = len(json.dumps(BODY)) + len(b"[0]\n[1]\n[2]\n")
    # An eighth of the budget is for journals alone.
    budget = next(size for size in range(num_bytes) if size + size // 8 >= num_bytes)
    router = await start_router(*engines, max_body_size=budget, max_held_body_size=budget)
    engines[0].die_after_tokens = num_tokens
    body = await stream(client, router)
    assert (body == whole, b"stream_interrupted" in body) == ((True, False) if num_tokens == 3 else (False, True))


async def test_a_journal_counts_as_held_until_its_stream_ends(
    engines: Any, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(*engines)
    engines[0].later_gate.clear()

    def num_held() -> float:
        (line,) = [line for line in router.metrics.render().splitlines() if line.startswith(b"kvasir_router_held_body")]
        return float(line.split()[1])

    async with client.post(router.url + CHAT, json=BODY) as response:
        await until(lambda: num_held() == len(engines[0].bodies[0]) + len(b"[0]\n"))
        engines[0].later_gate.set()
        await response.read()
    await until(lambda: num_held() == 0)


@pytest.mark.parametrize(("num_held", "goes_on"), [(30, True), (31, False)])
async def test_a_stream_goes_on_if_no_more_of_a_block_has_come_than_is_held(
    num_held: int, goes_on: bool, engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, tuned={"journal": JournalBounds(max_block_bytes=30)})
    engines[0].die_after_bytes = len(b": kvasir [0]\n" + engines[0].stream_bytes(1)) + num_held
    body = await stream(client, router)
    assert (body == whole, b"stream_interrupted" in body) == (goes_on, not goes_on)
    assert body.startswith(whole[: len(engines[0].stream_bytes(1)) + (0 if goes_on else num_held - 13)])


async def test_the_engine_that_goes_on_is_shown_the_routers_secret_too(
    engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, router_secret="s3")
    engines[0].die_after_tokens = 3
    assert await stream(client, router) == whole
    assert [engine.headers[0]["x-kvasir-router-secret"] for engine in engines] == ["s3", "s3"]


@pytest.mark.parametrize("num_bytes", [5, 20, 100, 200, 300, 301, 302, 303, 350, 700])
async def test_a_cut_within_an_event_shows_nothing_twice(
    num_bytes: int, engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    engines[0].die_after_bytes = num_bytes
    assert await stream(client, router) == whole
    assert len(engines[1].requests) == 1


async def test_the_resumed_request_is_the_clients_own(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines)
    engines[0].die_after_tokens = 3
    forged = {"x-kvasir-journal-at": "1", "x-kvasir-resumable": "no", "x-mine": "1"}
    async with client.post(router.url + CHAT, json=BODY, headers=forged) as response:
        await response.read()
    assert engines[0].bodies == engines[1].bodies
    assert engines[1].headers[0]["x-mine"] == "1"
    assert engines[1].headers[0]["x-request-id"] == engines[0].headers[0]["x-request-id"]


async def test_resumptions_are_counted_by_reason(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines)
    engines[0].die_after_tokens = 3
    await stream(client, router)
    text = await metrics(client, router)
    assert 'kvasir_router_streams_resumed_total{reason="broken"} 1.0' in text
    assert 'kvasir_router_upstream_errors_total{reason="broken"} 1.0' in text
    assert 'kvasir_router_requests_total{code="200",model="tiny"} 1.0' in text
    assert "kvasir_router_overhead_seconds_count 1.0" in text


async def test_a_stream_may_be_lost_again_and_again_while_it_gets_further(
    engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, retries=1)
    for number, engine in enumerate(engines):
        engine.die_after_bytes = 400 + number  # two or three events of every attempt
    assert await stream(client, router) == whole
    assert sum(len(engine.requests) for engine in engines) > 2


async def test_a_stream_that_gets_no_further_is_given_up(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines, retries=2)
    for engine in engines:
        engine.die_after_tokens = 3
    body = await stream(client, router)
    assert body.startswith(engines[0].stream_bytes(3))
    assert b'"code":"stream_interrupted"' in body
    assert sum(len(engine.requests) for engine in engines) == 1 + 2


async def test_an_engine_that_will_not_continue_is_passed_over(
    three_engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    first, second, last = three_engines
    first.die_after_tokens, second.keeps_journal = 4, False  # of another make
    router = await start_router(*three_engines, policy="roundRobin", retries=1)
    assert await stream(client, router) == whole
    assert [len(engine.requests) for engine in three_engines] == [1, 1, 1]
    assert last.journals == [b"[0]\n[1]\n[2]\n[3]\n"]


async def test_an_engine_that_is_full_keeps_no_stream_from_the_next(
    three_engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    first, second, _ = three_engines
    first.die_after_tokens, second.status, second.retry_after = 4, 429, "9"
    router = await start_router(*three_engines, policy="roundRobin", retries=1)
    assert await stream(client, router) == whole
    (service,) = router.services
    assert service.registry.get(second.url).suspect_until > 0


async def test_a_stream_that_nobody_continues_is_given_up(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines, retries=1)
    engines[0].die_after_tokens, engines[1].keeps_journal = 3, False
    body = await stream(client, router)
    assert body.startswith(engines[0].stream_bytes(3))
    assert b'"code":"stream_interrupted"' in body
    assert len(engines[0].requests) + len(engines[1].requests) <= 1 + len(engines) + 1


async def test_a_stream_waits_for_the_only_engine_to_come_back(
    engines: Any, whole: bytes, start_router: Any, client: Any, until: Any
) -> None:
    engine = engines[0]
    router = await start_router(engine)
    engine.hang_after_tokens = 4
    answer = asyncio.create_task(stream(client, router))
    await engine.wait_for_requests(1)
    engine.is_healthy = False
    await until(lambda: router.services.num_waiting == 1)
    assert 'kvasir_router_queued_requests{service="",tenant=""} 1.0' in await metrics(client, router)
    engine.hang_after_tokens, engine.is_healthy = None, True
    assert await answer == whole


async def test_a_stream_waits_when_all_engines_die_at_once(
    engines: Any, whole: bytes, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(*engines, probe_interval=60.0)  # none of which finds them dead
    engines[0].hang_after_tokens = 4
    async with client.post(router.url + CHAT, json=BODY) as response:
        first = await response.content.readexactly(len(engines[0].stream_bytes(4)))
        await engines[1].stop()
        await engines[0].stop()
        await until(lambda: router.services.num_waiting == 1)
        await engines[1].start()
        assert first + await response.content.read() == whole


async def test_without_any_engine_left_the_stream_ends_with_an_error(
    engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engines[0], max_queue_wait=0.1)
    engines[0].hang_after_tokens = 2
    async with client.post(router.url + CHAT, json=BODY) as response:
        await response.content.readexactly(len(engines[0].stream_bytes(2)))
        engines[0].is_healthy = False
        assert b'"code":"stream_interrupted"' in await response.content.read()


async def test_streams_of_an_unhealthy_engine_go_elsewhere(
    engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    engines[0].hang_after_tokens = 4
    answer = asyncio.create_task(stream(client, router))
    await engines[0].wait_for_requests(1)
    engines[0].is_healthy = False
    assert await answer == whole
    assert 'streams_resumed_total{reason="unresponsive"} 1.0' in await metrics(client, router)
    await asyncio.wait_for(engines[0].aborted.wait(), 5)


async def test_a_stream_that_had_its_last_event_is_over_when_its_engine_hangs(
    engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    engines[0].hang_after_tokens = engines[0].num_tokens
    async with client.post(router.url + CHAT, json=BODY) as response:
        first = await response.content.readexactly(len(whole))
        engines[0].is_healthy = False
        assert (first, await response.content.read()) == (whole, b"")
    assert engines[1].requests == []
    assert 'requests_total{code="200",model="tiny"} 1.0' in await metrics(client, router)


@pytest.mark.parametrize("has_other", [True, False])
async def test_a_client_may_leave_while_its_stream_is_moved(
    has_other: bool, engines: Any, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(*engines[: 1 + has_other])
    engines[0].hang_after_tokens = 4
    engines[1].gate.clear()
    answer = asyncio.create_task(stream(client, router))
    await engines[0].wait_for_requests(1)
    engines[0].is_healthy = False
    await until(lambda: bool(engines[1].requests if has_other else router.services.num_waiting))
    answer.cancel()
    await until(lambda: router.services.num_waiting == 0)
    await until(lambda: all(one["num_in_flight"] == 0 for one in router.services.describe()))
    assert 'requests_total{code="499",model="tiny"} 1.0' in await metrics(client, router)
    if has_other:
        await asyncio.wait_for(engines[1].aborted.wait(), 5)


async def test_a_moved_stream_is_counted_where_it_is(
    engines: Any, whole: bytes, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(*engines)
    engines[0].die_after_tokens = 4
    engines[1].gate.clear()
    answer = asyncio.create_task(stream(client, router))
    await engines[1].wait_for_requests(1)
    first, second = sorted(router.services.describe(), key=lambda one: one["url"])
    assert (first["num_in_flight"], first["resident_tokens"], second["num_in_flight"]) == (0, 0, 1)
    engines[1].gate.set()
    assert await answer == whole
    await until(lambda: all(one["num_in_flight"] == one["resident_tokens"] == 0 for one in router.services.describe()))


async def test_streams_of_a_silent_engine_go_elsewhere(
    engines: Any, whole: bytes, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, probe_timeout=0.1, hung_after=0.1)
    engines[0].hang_after_tokens = 4
    answer = asyncio.create_task(stream(client, router))
    await engines[0].wait_for_requests(1)
    engines[0].is_silent = True
    assert await answer == whole


async def test_requests_of_an_only_engine_that_is_silent_for_a_while_are_answered_there(
    engines: Any, start_router: Any, client: Any, until: Any
) -> None:
    engine, num_requests = engines[0], 8
    router = await start_router(engine, probe_timeout=0.05, hung_after=0.05)
    engine.gate.clear()
    asked = [asyncio.create_task(client.post(router.url + CHAT, json=BODY)) for _ in range(num_requests)]
    await engine.wait_for_requests(num_requests)
    engine.is_silent = True
    await until(lambda: [one["state"] for one in router.services.describe()] == ["not_ready"])
    engine.is_silent = False
    engine.gate.set()
    assert [(await each).status for each in asked] == [200] * num_requests
    assert len(engine.requests) == num_requests


@pytest.mark.parametrize("is_stream", [True, False])
async def test_requests_not_begun_at_a_hung_engine_go_elsewhere(
    is_stream: bool, engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines)
    engines[0].gate.clear()
    answer = asyncio.create_task(client.post(router.url + CHAT, json=BODY | {"stream": is_stream}))
    await engines[0].wait_for_requests(1)
    engines[0].is_healthy = False
    async with await answer as response:
        assert (response.status, response.headers["x-engine"]) == (200, engines[1].name)


async def test_a_draining_engine_keeps_its_streams(
    engines: Any, whole: bytes, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(*engines)
    engines[0].gate.clear()
    answer = asyncio.create_task(stream(client, router))
    await engines[0].wait_for_requests(1)
    engines[0].is_ready = False
    await until(lambda: [one["state"] for one in router.services.describe()].count("not_ready") == 1)
    engines[0].gate.set()
    assert await answer == whole
    assert engines[1].requests == []


async def test_a_stream_without_a_journal_is_left_to_wait(
    engines: Any, whole: bytes, start_router: Any, client: Any, until: Any
) -> None:
    """Of an engine of another make: what it hangs on may pass."""
    engines[0].keeps_journal = False
    router = await start_router(engines[0])
    engines[0].token_seconds = 0.05
    async with client.post(router.url + CHAT, json=BODY) as response:
        first = await response.content.readany()
        engines[0].is_healthy = False
        await until(lambda: router.services.describe()[0]["state"] == "unreachable")
        assert first + await response.content.read() == whole


class OneSlice:
    """A Kubernetes API with the engines as ready endpoints, which can be taken away."""

    def __init__(self, *engines: Any) -> None:
        self._engines = engines
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    def _slice(self, engine: Any, *, is_ready: bool) -> dict[str, Any]:
        return {
            "metadata": {"name": engine.name, "resourceVersion": "1"},
            "ports": [{"name": "http", "port": engine.port}],
            "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": is_ready}}],
        }

    def take_away(self, engine: Any) -> None:
        self._events.put_nowait({"type": "MODIFIED", "object": self._slice(engine, is_ready=False)})

    async def list(self) -> Any:
        return [self._slice(engine, is_ready=True) for engine in self._engines], "1"

    async def watch(self, resource_version: str) -> Any:
        while True:
            yield await self._events.get()


async def test_an_endpoint_that_kubernetes_calls_ready_is_watched(
    engines: Any, whole: bytes, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(slice_api=OneSlice(*engines), endpoints_service="models/llama:http")
    await until(lambda: router.services.of("tiny").registry.can_place("tiny"))
    for engine in engines:
        engine.hang_after_tokens = 4
    answer = asyncio.create_task(stream(client, router))
    await until(lambda: any(engine.requests for engine in engines))
    hung, other = sorted(engines, key=lambda engine: -len(engine.requests))
    other.hang_after_tokens = None
    hung.is_healthy = False
    assert await answer == whole


async def test_an_endpoint_that_is_gone_is_watched_as_long_as_streams_come_from_it(
    engines: Any, whole: bytes, start_router: Any, client: Any, until: Any
) -> None:
    api = OneSlice(*engines)
    router = await start_router(slice_api=api, endpoints_service="models/llama:http")
    await until(lambda: len(router.services.of(None).catalog.names()) == 1)
    for engine in engines:
        engine.hang_after_tokens = 4
    answer = asyncio.create_task(stream(client, router))
    await until(lambda: any(engine.requests for engine in engines))
    hung, other = sorted(engines, key=lambda engine: -len(engine.requests))
    other.hang_after_tokens = None
    api.take_away(hung)
    await until(lambda: [one["url"] for one in router.services.describe()] == [other.url])
    hung.is_healthy = False
    assert await answer == whole
