"""A scenario's own program in the control plane's network, reached there by the API server and by pods."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.rig.layout import LOGS, PID_FILE, ROOT_OF_TREE


@contextmanager
def running_guest(name: str, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ended with the block, and killed with this process: it is not among the processes that `down` ends."""
    enter = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--target={PID_FILE.read_text()}", "--net"]
    with (
        log_of(name).open("wb") as log,
        subprocess.Popen([*enter, *command], cwd=ROOT_OF_TREE, stdout=log, stderr=log) as guest,
    ):
        try:
            yield guest
        finally:
            guest.terminate()


def log_of(name: str) -> Path:
    """Standard output and error; in `down` it goes with the cluster."""
    return LOGS / f"{name}.log"
