"""Clients that leave and engines that fail at any moment of a split request: both legs end, and nothing is left."""

import asyncio
import random
from typing import Any

import pytest
from tests.router.split_engines import Split
from tests.router.test_fuzz import Traces, break_off

pytestmark = pytest.mark.anyio
NUM_AT_ONCE = 32


@pytest.fixture
def split(start_router: Any, exit_stack: Any) -> Split:
    made = Split(start_router, exit_stack)
    for engine in made.engines:
        engine.token_seconds = 0.001
    return made


async def served(router: Any, client: Any) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with asyncio.timeout(10), client.post(router.url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200
        return bytes(await response.read())


async def keep_failing(split: Split, chance: random.Random) -> None:
    """Each engine in its turn answers with errors, dies at once, dies in the middle, or is slow."""
    while True:
        engine = chance.choice(split.engines)
        name, value, usual = chance.choice(
            [("status", 500, 200), ("die_before_headers", True, False), ("die_after_tokens", 2, None),
             ("token_seconds", 0.05, 0.001)]
        )  # fmt: skip
        setattr(engine, name, value)
        await asyncio.sleep(chance.random() * 0.05)
        setattr(engine, name, usual)


@pytest.mark.parametrize("num_aborts", [300, pytest.param(3_000, marks=pytest.mark.slow)])
async def test_random_aborts_and_failures_leave_no_ticket_connection_or_task(
    num_aborts: int, split: Split, client: Any
) -> None:
    router = await split.start(2, 2, max_in_flight=8, max_queue_size=20)
    await served(router, client)
    traces, chance = Traces(router), random.Random(12)
    remaining = iter(range(num_aborts))

    async def keep_breaking_off() -> None:
        for _ in remaining:
            await break_off(router, chance)

    trouble = asyncio.create_task(keep_failing(split, random.Random(13)))
    await asyncio.gather(*(keep_breaking_off() for _ in range(NUM_AT_ONCE)))
    trouble.cancel()
    await asyncio.wait([trouble])
    assert min(len(engine.requests) for engine in split.engines) > 0
    for engine in split.engines:
        engine.status, engine.die_before_headers, engine.die_after_tokens = 200, False, None
        engine.requests.clear()
    async with asyncio.timeout(60):
        while left := traces.left_behind():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert left == {}
    assert await served(router, client)
