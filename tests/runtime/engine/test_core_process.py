"""The engine core's process, with other programs in its place."""

import asyncio
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from kvasir_runtime.config import ModelConfig, RuntimeConfig, ServerConfig
from kvasir_runtime.engine.channel import EngineChannel, tell_api_processes
from kvasir_runtime.engine.core_process import running_engine_core
from kvasir_runtime.engine.messages import EngineFailed, FromCore

CONFIG = RuntimeConfig(model=ModelConfig(model="folder"), server=ServerConfig(api_server_count=2))


def forked(program: Callable[..., object], *arguments: object) -> Callable[[object], BaseProcess]:
    """A core that is this program."""
    fork = multiprocessing.get_context("fork")
    return lambda _: fork.Process(target=program, args=arguments)


def test_a_core_that_ends_by_itself_is_told_to_every_api_process(tmp_path: Path) -> None:
    async def listen() -> list[list[FromCore]]:
        channels = [EngineChannel(tmp_path, index) for index in range(2)]
        with running_engine_core(CONFIG, tmp_path, make_process=forked(sys.exit, 3)):
            messages = [await asyncio.wait_for(channel.receive(), 10) for channel in channels]
        for channel in channels:
            channel.close()
        return messages

    failed = EngineFailed(error="its process ended with status 3")
    assert asyncio.run(listen()) == [[failed], [failed]]


def test_a_stop_leaves_no_process_no_thread_and_no_socket(tmp_path: Path) -> None:
    threads = threading.active_count()
    with running_engine_core(CONFIG, tmp_path, make_process=forked(signal.pause)) as process:
        assert process.is_alive()
    assert not process.is_alive()
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_a_stop_is_not_told_as_a_failure(tmp_path: Path) -> None:
    last = EngineFailed(error="told after it")

    async def listen() -> list[FromCore]:
        channel = EngineChannel(tmp_path, 0)
        with running_engine_core(CONFIG, tmp_path, make_process=forked(signal.pause)):
            pass
        tell_api_processes(tmp_path, 1, 0, last)
        messages = await asyncio.wait_for(channel.receive(), 10)
        channel.close()
        return messages

    assert asyncio.run(listen()) == [last]


def interrupted() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a process that has just begun
    signal.raise_signal(signal.SIGINT)
    sys.exit(3)


def test_an_interrupt_of_the_terminal_never_reaches_a_core(tmp_path: Path) -> None:
    with running_engine_core(CONFIG, tmp_path, make_process=forked(interrupted)) as process:
        process.join(10)
    assert process.exitcode == 3, "its watcher may be the one who was told, and has ended by now"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
