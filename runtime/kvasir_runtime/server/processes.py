"""Several API processes on one listening socket, and the parent that passes signals on and watches them."""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from kvasir_runtime.child_process import follow_parent
from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.logs import configure_logging
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
    _forward_signals(processes)
    for process in processes:
        process.start()
    running: dict[object, BaseProcess] = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait([process.sentinel for process in running.values()]):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode:
                _terminate(list(running.values()))
    return max(abs(process.exitcode or 0) for process in processes) and 1


def _run_one(parent_pid: int, config: RuntimeConfig, api_index: int, listener: socket.socket, ipc_dir: Path) -> None:
    follow_parent(parent_pid)
    configure_logging(config.server.log_level)
    sys.exit(run_api_server(config, api_index, [listener], ipc_dir))


def _forward_signals(processes: Sequence[BaseProcess]) -> None:
    def forward(number: int, frame: FrameType | None) -> None:
        _terminate(processes)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the children as well


def _terminate(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
