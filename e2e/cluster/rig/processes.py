"""Programs of the cluster: started with their output in a file, watched by the process that is PID 1 beside them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rig.layout import LOGS


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


def reap_until_one_ends(programs: dict[str, subprocess.Popen[bytes]]) -> NoReturn:
    """Do PID 1's duty; when one of the programs ends, end too, which takes the whole namespace along."""
    names = {process.pid: name for name, process in programs.items()}
    while True:
        pid, status = os.wait()
        if pid in names:
            sys.exit(f"{names[pid]} ended with status {os.waitstatus_to_exitcode(status)}:\n{last_words(names[pid])}")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
