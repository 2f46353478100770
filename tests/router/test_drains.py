"""Streams of an engine that drains go on at others, which find its KV in their journals; whatever fails meanwhile, each
client gets every byte once, also where no failure may be repeated."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
NUM_TOKENS = 200


class Fleet:
    """An engine that keeps a stream standing after 70 tokens, and those to which it may go, in their order."""

    def __init__(self, engines: list[Any], router: Any, client: Any) -> None:
        self.leaving, self.next, self.last = engines
        self._num_received = 0
        self.router = router
        self.service = router.services.of(None)
        self._client = client

    async def stream(self) -> bytes:
        async with self._client.post(self.router.url + CHAT, json=BODY) as response:
            assert response.status == 200
            content = b""
            async for chunk in response.content.iter_any():
                content += chunk
                self._num_received = len(content)
            return content

    async def drain(self) -> "asyncio.Task[bytes]":
        """A stream that has begun at the engine which drains now."""
        task = asyncio.create_task(self.stream())
        async with asyncio.timeout(5):
            while self._num_received < len(self.leaving.stream_bytes(70)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        self.leaving.is_ready = False
        return task

    async def metrics(self) -> str:
        async with self._client.get(self.router.admin_url + "/metrics") as response:
            text: str = await response.text()
            return text

    @property
    def whole(self) -> bytes:
        return bytes(self.leaving.stream_bytes(NUM_TOKENS) + b"data: [DONE]\n\n")


@pytest.fixture
async def fleet(engines: Any, start_router: Any, client: Any) -> AsyncIterator[Fleet]:
    third = type(engines[0])("three")
    await third.start()
    engines = sorted([*engines, third], key=lambda engine: engine.url)  # the order in which equals are picked
    for engine in engines:
        engine.keeps_journal, engine.num_tokens = True, NUM_TOKENS
    engines[0].hang_after_tokens = 70
    yield Fleet(engines, await start_router(*engines, retries=0), client)
    await third.stop()


async def test_a_stream_goes_on_at_another_engine_and_nobody_has_failed(fleet: Fleet) -> None:
    assert await (await fleet.drain()) == fleet.whole
    assert (len(fleet.leaving.requests), len(fleet.next.requests)) == (1, 1)
    assert fleet.leaving.asked_to_hand_over == [fleet.leaving.headers[-1]["x-request-id"]]
    text = await fleet.metrics()
    assert 'kvasir_router_streams_resumed_total{reason="moved"} 1.0' in text
    assert 'kvasir_router_upstream_errors_total{reason="broken"} 0.0' in text
    assert 'kvasir_router_retries_total{reason="broken"} 0.0' in text
    assert fleet.service.registry.get(fleet.leaving.url).suspect_until == 0.0


async def test_what_was_generated_counts_as_kv_that_the_next_engine_will_hold(fleet: Fleet) -> None:
    fleet.next.gate.clear()
    stream = await fleet.drain()
    await fleet.next.wait_for_requests(1)
    load = fleet.service.registry.get(fleet.next.url).load
    assert load.kv_used_tokens >= 70
    assert load.prefill_tokens == 0
    fleet.next.gate.set()
    assert await stream == fleet.whole


def _dies(engine: Any) -> None:
    engine.die_before_headers = True


def _dies_later(engine: Any) -> None:
    engine.die_before_first_token = True


def _ends_without_a_token(engine: Any) -> None:
    engine.ends_after_tokens = 70


def _fails(engine: Any) -> None:
    engine.status = 500


def _is_busy(engine: Any) -> None:
    engine.status, engine.retry_after = 503, "1"


def _refuses(engine: Any) -> None:
    engine.status = 409


@pytest.mark.parametrize("harm", [_dies, _dies_later, _ends_without_a_token, _fails, _is_busy, _refuses])
async def test_a_stream_that_the_next_engine_does_not_continue_goes_on_at_another(
    harm: Callable[[Any], None], fleet: Fleet
) -> None:
    harm(fleet.next)
    assert await (await fleet.drain()) == fleet.whole
    assert (len(fleet.next.requests), len(fleet.last.requests)) == (1, 1)


async def test_an_engine_that_is_gone_costs_nothing(fleet: Fleet) -> None:
    await fleet.next.stop()
    assert await (await fleet.drain()) == fleet.whole


async def test_an_engine_that_dies_after_more_of_the_stream_counts_as_any_other(fleet: Fleet) -> None:
    fleet.next.die_after_tokens = 80
    body = await (await fleet.drain())
    assert body.startswith(fleet.leaving.stream_bytes(80))
    assert b'"code":"stream_interrupted"' in body, "no failure may be repeated"


async def test_an_engine_that_does_not_hand_over_keeps_its_stream(fleet: Fleet, until: Any) -> None:
    fleet.leaving.lets_go = False
    stream = await fleet.drain()
    await until(lambda: fleet.leaving.asked_to_hand_over)
    assert not fleet.next.requests
    fleet.leaving.let_go()
    assert await stream == fleet.whole


async def test_a_client_may_leave_while_its_stream_moves(fleet: Fleet, until: Any) -> None:
    fleet.next.gate.clear()
    stream = await fleet.drain()
    await fleet.next.wait_for_requests(1)
    stream.cancel()
    await until(lambda: all(one["num_in_flight"] == 0 for one in fleet.service.describe()))


async def test_a_stream_may_be_handed_over_again_and_again(fleet: Fleet) -> None:
    fleet.leaving.hang_after_tokens, fleet.leaving.moves_after_tokens = None, 3
    fleet.next.moves_after_tokens = 4
    assert await fleet.stream() == fleet.whole
    assert [len(engine.requests) for engine in (fleet.leaving, fleet.next, fleet.last)] == [1, 1, 1]
