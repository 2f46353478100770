"""Several API processes on one listening socket, and the parent that passes signals on and watches them."""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from kvasir_logging import log_to_stderr
from kvasir_runtime.child_process import follow_parent
from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.engine.channel import tell_cores
from kvasir_runtime.engine.messages import ApiGone
from kvasir_runtime.heartbeat import api_heartbeats
from kvasir_runtime.server.admission import forget_process
from kvasir_runtime.server.launch import run_api_server


def run_api_processes(config: RuntimeConfig, listener: socket.socket, ipc_dir: Path) -> int:
    """Serve until all have drained; when one fails the others are drained too. Returns the exit status."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_run_one, args=(os.getpid(), config, index, listener, ipc_dir), name=f"kvasir-api-{index}"
        )
        for index in range(config.server.api_server_count)
    ]

    def give_up_requests(api_index: int) -> None:
        """Its clients are gone with it: neither the core works for them, nor do they take the others' places."""
        count, num_cores = config.server.api_server_count, config.parallel.data_parallel_size
        forget_process(ipc_dir, count, api_index)
        api_heartbeats(ipc_dir, count, num_cores, api_index).leave()
        tell_cores(ipc_dir, num_cores, ApiGone(api_index))

    return supervise(processes, give_up_requests)


def supervise(processes: Sequence[BaseProcess], give_up_requests: Callable[[int], None]) -> int:
    """Start them and pass SIGTERM on to them, until all have ended; when one fails its requests are given up and the
    others are terminated. Returns the exit status."""
    started = _start(processes)
    running: dict[object, BaseProcess] = {process.sentinel: process for process in started}
    while running:
        for sentinel in wait([process.sentinel for process in running.values()]):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode:
                give_up_requests(started.index(ended))
                _terminate(list(running.values()))
    return max(abs(process.exitcode or 0) for process in processes) and 1


def _run_one(parent_pid: int, config: RuntimeConfig, api_index: int, listener: socket.socket, ipc_dir: Path) -> None:
    follow_parent(parent_pid)
    log_to_stderr(config.server.log_level, config.server.log_format)
    sys.exit(run_api_server(config, api_index, [listener], ipc_dir))


def _start(processes: Sequence[BaseProcess]) -> list[BaseProcess]:
    """From now on they are sent every SIGTERM. One that comes meanwhile waits until it can be, and no more are started.

    Returns those that were.
    """
    started: list[BaseProcess] = []
    is_stopping = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = True

    def forward(number: int, frame: FrameType | None) -> None:
        _terminate(started)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the children as well
    signal.signal(signal.SIGTERM, remember)
    for process in processes:
        if is_stopping:
            break
        process.start()
        started.append(process)
    signal.signal(signal.SIGTERM, forward)
    if is_stopping:
        _terminate(started)
    return started


def _terminate(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
