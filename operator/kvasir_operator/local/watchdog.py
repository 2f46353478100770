"""Ends the pods' processes when `kvasir-operator local` itself was killed and could not.

A process of its own, started as `python -m kvasir_operator.local.watchdog`. Its standard input is a pipe from `local`:
`+GROUP` and `-GROUP` lines say which process groups live, and the end of the pipe, which the kernel brings about
however `local` ends, says that those left over must go. Unlike a parent-death signal this also reaches the pods'
children.
"""

import asyncio
import os
import signal
import sys
import time

# Short: whoever killed `local` does not wait for requests in flight.
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05


class Watchdog:
    """The side of `local`: tells the watchdog process which groups live."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "Watchdog":
        """In a session of its own, so that Ctrl-C in the terminal does not reach it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process)

    def guard(self, group: int) -> None:
        self._tell(f"+{group}")

    def release(self, group: int) -> None:
        self._tell(f"-{group}")

    async def close(self) -> None:
        """Ends the watchdog, and with it every group that was not released."""
        stdin = self._stdin()
        stdin.close()
        await self._process.wait()

    def _tell(self, line: str) -> None:
        self._stdin().write(f"{line}\n".encode())

    def _stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None
        return self._process.stdin


def end_group(group: int, signal_number: int) -> bool:
    """Whether the group still had a process to signal."""
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    left = {group for group in groups if end_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + _GRACE_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        left = {group for group in left if end_group(group, 0)}
    for group in left:
        end_group(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
