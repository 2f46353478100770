"""An API process over two engine cores, both played by the test."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.runtime.engine.test_async_engine import READY, TOKENIZER, Core, ids, request, stats

from kvasir_runtime.engine.async_engine import AsyncEngine
from kvasir_runtime.engine.channel import CoreChannel, EngineChannel
from kvasir_runtime.engine.messages import Abort, AbortRequests, EngineFailed
from kvasir_runtime.errors import EngineDeadError
from kvasir_runtime.request_metrics import RequestMetrics, request_rows
from kvasir_runtime.requests.outputs import SequenceOutput

Cores = tuple[AsyncEngine, list[Core], list[CoreChannel]]


@asynccontextmanager
async def engine_and_cores(folder: Path, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Cores]:
    core_channels = [CoreChannel(folder, 1, index) for index in range(2)]
    channels = [EngineChannel(folder, 0, index) for index in range(2)]
    metrics = RequestMetrics(request_rows(folder, 1).row(0))
    engine = AsyncEngine(channels, TOKENIZER, metrics, api_index=0, clock=clock)
    task = asyncio.create_task(engine.run())
    try:
        yield engine, [Core(channel) for channel in core_channels], core_channels
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for channel in (*channels, *core_channels):
            channel.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_true():  # noqa: ASYNC110 - a test looks; nothing else waits for it
            await asyncio.sleep(0)


async def all_ready(engine: AsyncEngine, cores: list[Core]) -> None:
    for core in cores:
        core.ready()
    await until(lambda: engine.ready is not None)


def test_it_is_ready_when_all_cores_are(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_cores(tmp_path) as (engine, cores, _):
            cores[1].ready()
            await until(lambda: len(engine.stats_by_core) == 1)
            assert engine.ready is None
            cores[0].ready()
            await until(lambda: engine.ready is not None)
            assert engine.ready is not None
            assert engine.ready.num_blocks == 2 * READY.num_blocks

    asyncio.run(play())


def test_requests_are_shared_out_and_each_is_answered_by_its_core(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_cores(tmp_path) as (engine, cores, _):
            await all_ready(engine, cores)
            with engine.generate([request()]) as first, engine.generate([request()]) as second:
                [one], [two] = await cores[0].receive(1), await cores[1].receive(1)
                cores[1].step(SequenceOutput(request_id=two.request_id, new_token_ids=ids("b"), finish_reason="length"))
                cores[0].step(SequenceOutput(request_id=one.request_id, new_token_ids=ids("a"), finish_reason="length"))
                texts = [(await asyncio.wait_for(anext(generation), 5))[0].text for generation in (first, second)]
            assert texts == ["a", "b"]
            assert engine.stats is not None
            assert engine.stats.num_steps == 2

    asyncio.run(play())


def test_one_that_is_left_is_aborted_in_its_own_core_alone(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_cores(tmp_path) as (engine, cores, _):
            await all_ready(engine, cores)
            with engine.generate([request()]), engine.generate([request()]):
                await cores[0].receive(1)
                [added] = await cores[1].receive(1)
                await asyncio.sleep(0)
            [aborted] = await cores[1].receive(1)
            assert aborted == AbortRequests(aborts=[Abort(added.request_id)])

    asyncio.run(play())


def test_the_death_of_one_core_is_the_end_of_all(tmp_path: Path) -> None:
    async def play() -> None:
        async with engine_and_cores(tmp_path) as (engine, cores, channels):
            await all_ready(engine, cores)
            with engine.generate([request()]) as generation:
                await cores[0].receive(1)
                channels[1].broadcast(EngineFailed(error="out of luck"))
                with pytest.raises(EngineDeadError, match="out of luck"):
                    await asyncio.wait_for(anext(generation), 5)
            with pytest.raises(EngineDeadError):
                engine.generate([request()])

    asyncio.run(play())


def test_a_core_that_hangs_is_seen_while_another_makes_steps(tmp_path: Path) -> None:
    now = 1000.0

    async def play() -> None:
        nonlocal now
        async with engine_and_cores(tmp_path, lambda: now) as (engine, cores, _):
            await all_ready(engine, cores)
            with engine.generate([request()]), engine.generate([request()]):
                assert not engine.is_stalled(50.0)
                now += 100.0
                cores[1].tell(stats(7))
                await until(lambda: engine.stats is not None and engine.stats.num_steps == 7)
                assert engine.is_stalled(50.0)
                cores[0].tell(stats(7))
                await until(lambda: not engine.is_stalled(50.0))

    asyncio.run(play())
