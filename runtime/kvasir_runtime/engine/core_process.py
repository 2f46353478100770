"""The engine core as a child process, seen from the parent: start it, and notice when it dies.

It is spawned, so that nothing of the API process is inherited, and its code is imported in the child only: torch has no
business in an API process.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from kvasir_runtime.child_process import follow_parent, interrupts_blocked
from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.engine.channel import tell_api_processes
from kvasir_runtime.engine.messages import EngineFailed
from kvasir_runtime.malloc import share_one_arena

OPENMP_SPINS = "1000"
"""Turns that an idle kernel thread spins before it sleeps. OpenMP's own default, some 300,000, keeps API processes and
clients off the cores: 64 requests of 256 in / 128 out on 2 cores gave 645-676 tok/s with it and 773-801 with this
(`offline` of benchmarks/workloads.py on llama-100m, two runs each)."""


@dataclass(frozen=True, slots=True)
class CoreProcessArguments:
    """What the child is told; picklable."""

    config: RuntimeConfig
    ipc_dir: Path
    parent_pid: int
    data_rank: int


def _spawned_core(arguments: CoreProcessArguments) -> BaseProcess:
    return multiprocessing.get_context("spawn").Process(
        target=_run_engine_core, args=(arguments,), name=f"kvasir-engine-core-{arguments.data_rank}"
    )


@contextmanager
def running_engine_cores(config: RuntimeConfig, ipc_dir: Path) -> Iterator[list[BaseProcess]]:
    """One for each data-parallel rank, as `running_engine_core`."""
    with ExitStack() as cores:
        yield [
            cores.enter_context(running_engine_core(config, ipc_dir, data_rank))
            for data_rank in range(config.parallel.data_parallel_size)
        ]


@contextmanager
def running_engine_core(
    config: RuntimeConfig,
    ipc_dir: Path,
    data_rank: int = 0,
    make_process: Callable[[CoreProcessArguments], BaseProcess] = _spawned_core,
) -> Iterator[BaseProcess]:
    """The engine core lives while the block runs. API processes are told of one that ends before, in whatever way.

    Behind the block nothing of it is left: neither the process nor anything that touches `ipc_dir`.
    """
    process = make_process(CoreProcessArguments(config, ipc_dir, os.getpid(), data_rank))
    with interrupts_blocked():
        process.start()
    has_to_end = threading.Event()

    def watch() -> None:
        process.join()
        if not has_to_end.is_set():
            failed = EngineFailed(error=f"its process ended with status {process.exitcode}")
            tell_api_processes(ipc_dir, config.server.api_server_count, data_rank, failed)

    watcher = threading.Thread(target=watch, name="engine-core-watch")
    watcher.start()
    try:
        yield process
    finally:
        has_to_end.set()
        process.kill()
        watcher.join()


def _run_engine_core(arguments: CoreProcessArguments) -> None:
    follow_parent(arguments.parent_pid)
    share_one_arena()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the terminal's signals, Kubernetes' are the parent's
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)  # read when torch loads OpenMP
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # today's default, which Triton 3.9 warns will change
    from kvasir_runtime.engine.core_main import run_engine_core  # torch: not for the parent

    run_engine_core(arguments.config, arguments.ipc_dir, arguments.data_rank)
