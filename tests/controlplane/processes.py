"""One server process of the test control plane: started with its output in a file, ended for certain."""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
LIBC = ctypes.CDLL(None)  # loaded here, because a forked child may only call what is already there


class ControlPlaneError(Exception):
    """The test control plane did not start or died; the message ends with the program's last words."""


class ServerProcess:
    """A program that runs until `kill`, or until this process is gone, however that ends."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.name = Path(command[0]).name
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, because an API server that is asked to stop waits for an etcd that may be gone."""
        self._process.kill()
        self._process.wait()

    def check_running(self) -> None:
        """Raise ControlPlaneError when the program has ended."""
        if (status := self._process.poll()) is not None:
            raise ControlPlaneError(
                f"{self.name} ended with status {status}, its last words were:\n{self.last_words()}"
            )

    def last_words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])

    def wait_until(self, probe: Callable[[], Found | None], seconds: float, what: str) -> Found:
        """`wait_until`, given up at once when the program ends; raises ControlPlaneError."""

        def probe_while_running() -> Found | None:
            self.check_running()
            return probe()

        try:
            return wait_until(probe_while_running, seconds, what)
        except TimeoutError as error:
            raise ControlPlaneError(f"{error}; {self.name}'s last words were:\n{self.last_words()}") from error


def wait_until(probe: Callable[[], Found | None], seconds: float, what: str, every_seconds: float = 0.05) -> Found:
    """Poll until `probe` gives something true and return it; raises TimeoutError that names `what`."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(every_seconds)
    return found


def die_with_parent() -> None:
    LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
