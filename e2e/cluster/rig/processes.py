"""Programs of the cluster: started with their output in a file, watched by the process that is PID 1 beside them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from e2e.cluster.rig.layout import HELD, LOGS, RUNNING

POLL_SECONDS = 0.1


def run(*command: str) -> str:
    """Run to the end; exits with the command and its own words when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"`{' '.join(command)}` gave status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def start(name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    with (LOGS / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def wait_until(is_true: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll; exits with `what` when it has not become true in time."""
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            sys.exit(f"waited {seconds:g} s in vain for {what}; the logs are in {LOGS}")
        time.sleep(0.05)


def last_words(name: str, lines: int = 15) -> str:
    return "\n".join((LOGS / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])


class Programs:
    """The programs of a PID 1. One that ends by itself takes the namespace and all that is in it along; one that
    faults.py holds is killed, and started again when it is let go."""

    def __init__(self) -> None:
        self._commands: dict[str, Sequence[str]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str]) -> None:
        self._commands[name], self._running[name] = command, start(name, command)
        (RUNNING / name).touch()

    def watch(self) -> NoReturn:
        while True:
            self._reap()
            for name, command in self._commands.items():
                if not is_held(name) and name not in self._running:
                    self.start(name, command)
                elif is_held(name) and name in self._running:
                    os.kill(self._running[name].pid, signal.SIGKILL)  # Popen.kill might reap it unseen
            time.sleep(POLL_SECONDS)

    def _reap(self) -> None:
        """A PID 1's duty to all that lost their parents, too."""
        while (ended := next_ended()) is not None:
            pid, status = ended
            name = next((name for name, process in self._running.items() if process.pid == pid), None)
            if name is None:
                continue
            if not is_held(name):
                sys.exit(f"{name} ended with status {os.waitstatus_to_exitcode(status)}:\n{last_words(name)}")
            del self._running[name]
            (RUNNING / name).unlink()


def is_held(name: str) -> bool:
    return (HELD / name).exists()


def next_ended() -> tuple[int, int] | None:
    """Number and status of a child that has ended."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
