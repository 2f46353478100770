"""Which of an engine's processes is which, as this machine numbers them: for the rig, whose nodes share its kernel."""

import signal
from collections.abc import Callable
from pathlib import Path

from e2e.cluster.rig.faults import host_pids, signal_processes
from e2e.engines import Engine


def all_processes(engine: Engine) -> list[int]:
    return host_pids(engine.uid, "engine")


def signalling(number: signal.Signals) -> Callable[[Engine], None]:
    """Sends the signal to all processes of an engine."""

    def strike(victim: Engine) -> None:
        signal_processes(victim.uid, "engine", number)

    return strike


def main_process(engine: Engine) -> int:
    """The container's PID 1: the API process, which is the core's parent."""
    [pid] = [pid for pid in all_processes(engine) if _number_inside(pid) == 1]
    return pid


def core_process(engine: Engine) -> int:
    """The one that multiprocessing has spawned; its resource tracker is another program."""
    [pid] = [pid for pid in all_processes(engine) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    return pid


def _number_inside(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [numbers] = [line for line in lines if line.startswith("NSpid:")]
    return int(numbers.split()[-1])
