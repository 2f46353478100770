"""Which bodies are read in a thread, and that others are served meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from kvasir_router.relay.body import LOOP_BYTES, SMALL_BYTES, LargeBodies

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


def chat(text: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]}


async def test_only_what_takes_long_is_read_in_a_thread() -> None:
    bodies = LargeBodies()
    threads = [await bodies.read(num_bytes, threading.current_thread) for num_bytes in (LOOP_BYTES, LOOP_BYTES + 1)]
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_one_large_body_is_read_at_a_time(until: Any) -> None:
    bodies, gate, begun = LargeBodies(), threading.Event(), list[int]()

    def work(number: int) -> None:
        begun.append(number)
        gate.wait()

    first, second = [asyncio.create_task(bodies.read(LOOP_BYTES + 1, partial(work, n))) for n in (1, 2)]
    await until(lambda: begun == [1])
    assert await bodies.read(LOOP_BYTES, lambda: "at once") == "at once"
    assert begun == [1]
    gate.set()
    await asyncio.gather(first, second)
    assert begun == [1, 2]


@pytest.mark.parametrize(("num_bytes", "at_once"), [(SMALL_BYTES, 9), (SMALL_BYTES + 1, 4), (LOOP_BYTES + 1, 1)])
async def test_few_bodies_that_are_not_small_are_worked_on_at_once(num_bytes: int, at_once: int) -> None:
    bodies, may_end, num_working = LargeBodies(), asyncio.Event(), [0]

    async def work() -> None:
        async with bodies.turn(num_bytes):
            num_working[0] += 1
            await may_end.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(9):
            group.create_task(work())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert num_working == [at_once]
        may_end.set()
    assert num_working == [9]


async def test_who_is_cancelled_lets_the_next_read_only_when_the_thread_has_ended(until: Any) -> None:
    bodies, gate, begun = LargeBodies(), threading.Event(), list[int]()

    def work(number: int) -> None:
        begun.append(number)
        gate.wait(10)

    first, second = [asyncio.create_task(bodies.read(LOOP_BYTES + 1, partial(work, n))) for n in (1, 2)]
    await until(lambda: begun == [1])
    for _ in range(2):
        first.cancel()
        await asyncio.wait([first, second], timeout=0.05)
        assert (begun, first.done()) == ([1], False)
    gate.set()
    await second
    assert (begun, first.cancelled()) == ([1, 2], True)


@pytest.fixture
async def gate() -> AsyncIterator[threading.Event]:
    """Closed: the only thread of the event loop is busy."""
    gate = threading.Event()
    executor = ThreadPoolExecutor(max_workers=1)
    asyncio.get_running_loop().set_default_executor(executor)
    executor.submit(gate.wait, 10)
    yield gate
    gate.set()


async def test_the_body_of_a_client_that_left_counts_as_long_as_it_is_read(
    engine: Any, start_router: Any, client: Any, until: Any, gate: threading.Event
) -> None:
    router = await start_router(engine, model="tiny", tuned={"loop_bytes": 1000})
    asked = asyncio.create_task(client.post(router.url + CHAT, json=chat("x" * 2000)))
    await until(lambda: figure(router, "held_body_bytes") > 2000)
    asked.cancel()
    await until(lambda: figure(router, "connections") == 0)
    assert figure(router, "held_body_bytes") > 2000
    gate.set()
    await until(lambda: figure(router, "held_body_bytes") == 0)


def figure(router: Any, name: str) -> float:
    lines = router.metrics.render().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"kvasir_router_{name} ")).split()[1])


async def test_others_are_served_while_a_large_body_is_read(
    engine: Any, start_router: Any, client: Any, until: Any, gate: threading.Event
) -> None:
    router = await start_router(engine, model="tiny", model_alias=("alias",), tuned={"loop_bytes": 1000})

    async def ask(text: str, model: str) -> int:
        async with client.post(router.url + CHAT, json=chat(text) | {"model": model}) as response:
            await response.read()
            return int(response.status)

    large = asyncio.create_task(ask("x" * 2000, "alias"))
    await until(lambda: figure(router, "held_body_bytes") > 2000)
    assert await ask("x", "tiny") == 200
    gate.set()
    assert await large == 200
    assert [(one["model"], len(one["messages"][0]["content"])) for one in engine.requests] == [
        ("tiny", 1),
        ("tiny", 2000),
    ]


async def test_a_large_body_that_is_no_json_is_refused(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine, tuned={"loop_bytes": 1000})
    async with client.post(router.url + CHAT, data=b"{" * 2000) as response:
        assert response.status == 400
