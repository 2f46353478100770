"""The engine core's process, with other programs in its place."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir_runtime.config import ModelConfig, RuntimeConfig, ServerConfig
from kvasir_runtime.engine import core_process
from kvasir_runtime.engine.channel import EngineChannel
from kvasir_runtime.engine.core_process import running_engine_core
from kvasir_runtime.engine.messages import EngineFailed, FromCore

CONFIG = RuntimeConfig(model=ModelConfig(model="folder"), server=ServerConfig(api_server_count=2))


@pytest.fixture
def core_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[object], object]], None]:
    """Forked, so that a test's own function can run there."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(core_process.multiprocessing, "get_context", lambda method: fork)
    return lambda program: monkeypatch.setattr(core_process, "_run_engine_core", program)


def test_a_core_that_ends_by_itself_is_told_to_every_api_process(tmp_path: Path, core_runs) -> None:
    core_runs(lambda arguments: os._exit(3))

    async def listen() -> list[list[FromCore]]:
        channels = [EngineChannel(tmp_path, index) for index in range(2)]
        with running_engine_core(CONFIG, tmp_path):
            messages = [await asyncio.wait_for(channel.receive(), 10) for channel in channels]
        for channel in channels:
            channel.close()
        return messages

    failed = EngineFailed(error="its process ended with status 3")
    assert asyncio.run(listen()) == [[failed], [failed]]


def test_a_stop_leaves_no_process_no_thread_and_no_socket(tmp_path: Path, core_runs) -> None:
    core_runs(lambda arguments: signal.pause())
    threads = threading.active_count()
    with running_engine_core(CONFIG, tmp_path) as process:
        assert process.is_alive()
    assert not process.is_alive()
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_a_stop_is_not_told_as_a_failure(tmp_path: Path, core_runs, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(core_process, "tell_api_processes", lambda *message: told.append(message))
    core_runs(lambda arguments: signal.pause())
    with running_engine_core(CONFIG, tmp_path):
        pass
    assert told == []
