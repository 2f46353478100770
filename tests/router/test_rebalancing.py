"""A stream that an overfull engine is asked to hand over goes on at the idle one; whatever fails meanwhile, its client
gets every byte once, also where no failure may be repeated."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvasir_router.config import KvEventPorts
from kvasir_router.placement.rebalancing import MoveCriteria
from kvasir_router.service.load_report import LoadReport
from kvasir_router.service.rebalancing import RebalancingSettings

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
NUM_TOKENS = 200


class Pair:
    """An engine that keeps a stream standing after 70 tokens, and one to which it may go."""

    def __init__(self, engines: list[Any], router: Any, client: Any) -> None:
        self.full, self.idle = engines
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

    async def begin(self) -> "asyncio.Task[bytes]":
        """A stream that runs on the engine which is now overfull by its own word."""
        self.tell(self.full, num_waiting=0, kv_used_tokens=0)
        self.tell(self.idle, num_waiting=0, kv_used_tokens=0)
        task = asyncio.create_task(self.stream())
        async with asyncio.timeout(5):
            while self._num_received < len(self.full.stream_bytes(70)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        self.tell(self.full, num_waiting=1, kv_used_tokens=1000)
        return task

    def tell(self, engine: Any, *, num_waiting: int, kv_used_tokens: int) -> None:
        """Its steps are so slow that a stream which stands is not taken for preempted."""
        report = LoadReport(1, num_waiting, 0, 0, kv_used_tokens, 1000, 0.1, None, (), "i", kv_transfer_port=5600)
        self.service.registry.get(engine.url).load.report(report, time.perf_counter())

    async def metrics(self) -> str:
        async with self._client.get(self.router.admin_url + "/metrics") as response:
            text: str = await response.text()
            return text

    @property
    def whole(self) -> bytes:
        return bytes(self.full.stream_bytes(NUM_TOKENS) + b"data: [DONE]\n\n")

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome.value: num for outcome, num in self.service.rebalancing.num_by_outcome.items() if num}


@pytest.fixture
def move_seconds() -> float:
    return 10.0


@pytest.fixture
async def pair(engines: Any, start_router: Any, client: Any, move_seconds: float) -> Pair:
    settings = RebalancingSettings(
        step_seconds=0.01, move_seconds=move_seconds, criteria=MoveCriteria(saturated_seconds=0.0)
    )
    engines = sorted(engines, key=lambda engine: engine.url)  # the order in which equals are picked
    for engine in engines:
        engine.keeps_journal, engine.num_tokens = True, NUM_TOKENS
    engines[0].hang_after_tokens = 70
    options = {"kv_events": KvEventPorts(1, 2), "rebalancing": "on", "retries": 0}
    return Pair(engines, await start_router(*engines, tuned={"rebalancing": settings}, **options), client)


async def test_a_stream_goes_on_at_the_idle_engine_and_nobody_has_failed(pair: Pair) -> None:
    assert await (await pair.begin()) == pair.whole
    assert (len(pair.full.requests), len(pair.idle.requests)) == (1, 1)
    assert pair.full.asked_to_hand_over == [pair.full.headers[-1]["x-request-id"]]
    text = await pair.metrics()
    assert 'kvasir_router_rebalanced_streams_total{outcome="moved",service=""} 1.0' in text
    assert 'kvasir_router_streams_resumed_total{reason="moved"} 1.0' in text
    assert 'kvasir_router_upstream_errors_total{reason="broken"} 0.0' in text
    assert 'kvasir_router_retries_total{reason="broken"} 0.0' in text
    full = pair.service.registry.get(pair.full.url)
    assert (full.suspect_until, full.load.max_in_flight) == (
        0.0,
        pair.service.registry.get(pair.idle.url).load.max_in_flight,
    )


async def test_what_was_drawn_counts_as_kv_that_the_receiver_will_hold(pair: Pair) -> None:
    pair.idle.gate.clear()
    stream = await pair.begin()
    await pair.idle.wait_for_requests(1)
    load = pair.service.registry.get(pair.idle.url).load
    assert load.kv_used_tokens >= 70
    assert load.prefill_tokens == 0
    pair.idle.gate.set()
    assert await stream == pair.whole


def _dies(engine: Any) -> None:
    engine.die_before_headers = True


def _dies_later(engine: Any) -> None:
    engine.die_before_first_token = True


def _fails(engine: Any) -> None:
    engine.status = 500


def _drains(engine: Any) -> None:
    engine.status, engine.retry_after = 503, "1"


def _refuses(engine: Any) -> None:
    engine.status = 409


@pytest.mark.parametrize("harm", [_dies, _dies_later, _fails, _drains, _refuses])
async def test_a_stream_that_its_receiver_does_not_continue_goes_on_where_it_was(
    harm: Callable[[Any], None], pair: Pair
) -> None:
    harm(pair.idle)
    stream = await pair.begin()
    pair.full.hang_after_tokens = None  # for what comes from now on
    assert await stream == pair.whole
    assert len(pair.full.requests) == 2
    assert pair.outcomes == {"elsewhere": 1}


async def test_a_receiver_that_ends_the_stream_without_a_token_has_not_handed_it_over(pair: Pair) -> None:
    """The journal still ends as the source has left it."""
    pair.idle.ends_after_tokens = 70
    stream = await pair.begin()
    pair.full.hang_after_tokens = None
    assert await stream == pair.whole
    assert (len(pair.full.requests), len(pair.idle.requests)) == (2, 1)
    assert 'upstream_errors_total{reason="broken"} 1.0' in await pair.metrics()


async def test_a_receiver_that_is_gone_costs_nothing(pair: Pair) -> None:
    stream = await pair.begin()
    pair.full.hang_after_tokens = None
    await pair.idle.stop()
    assert await stream == pair.whole


async def test_a_receiver_that_dies_after_more_of_the_stream_counts_as_any_other(pair: Pair) -> None:
    pair.idle.die_after_tokens = 80
    body = await (await pair.begin())
    assert body.startswith(pair.full.stream_bytes(80))
    assert b'"code":"stream_interrupted"' in body, "no failure may be repeated"


async def test_an_engine_that_does_not_hand_over_keeps_its_stream(pair: Pair, until: Any) -> None:
    pair.full.lets_go = False
    stream = await pair.begin()
    await until(lambda: pair.outcomes == {"stayed": 1})
    pair.full.let_go()
    assert await stream == pair.whole


@pytest.mark.parametrize("move_seconds", [0.1])
async def test_a_client_may_leave_while_its_stream_moves(pair: Pair, until: Any, move_seconds: float) -> None:
    pair.idle.gate.clear()
    stream = await pair.begin()
    await pair.idle.wait_for_requests(1)
    stream.cancel()
    await until(lambda: all(one["num_in_flight"] == 0 for one in pair.service.describe()))
    await until(lambda: pair.outcomes == {"elsewhere": 1})
    assert pair.service.rebalancing.num_streams == 0


async def test_a_stream_may_be_handed_over_again_and_again(engines: Any, start_router: Any, client: Any) -> None:
    """By engines that drain, where no failure may be repeated."""
    for number, engine in enumerate(engines):
        engine.keeps_journal, engine.num_tokens = True, 8
        engine.moves_after_tokens = 3 + number
    third = type(engines[0])("three")
    await third.start()
    try:
        third.keeps_journal, third.num_tokens = True, 8
        router = await start_router(*sorted([*engines, third], key=lambda one: one is third), retries=0)
        async with client.post(router.url + CHAT, json=BODY) as response:
            assert await response.read() == third.stream_bytes(8) + b"data: [DONE]\n\n"
    finally:
        await third.stop()
