"""How processes of pytest-xdist divide the tests: by file, rooms whose files share servers whole, some tests alone.

A room is one unit of work, so that its control plane or its engines are started once. A test marked `alone` holds a
clock or needs both cores: while it runs, the others wait between two tests of theirs.
"""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# The longest first: what starts last ends last.
ROOMS = ("tests/controlplane", "tests/local", "tests/contract")


class ByFile(LoadScopeScheduling):
    """Hands out whole files, and whole rooms of ROOMS before all others."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        # Files come as they are collected; xdist would begin with those of the most tests, which are not the longest.
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((room for room in ROOMS if file.startswith(room + "/")), file)


def order_of(nodeid: str) -> int:
    """Where a test stands: rooms first, in their order."""
    return next((index for index, room in enumerate(ROOMS) if nodeid.startswith(room + "/")), len(ROOMS))


class TakingTurns:
    """In a process of pytest-xdist: tests share a lock, and a test marked `alone` holds it by itself."""

    def __init__(self, directory: Path) -> None:
        """`directory` is one that the processes share."""
        self._running = directory / "running.lock"
        self._waiting = directory / "waiting.lock"

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout, which must not count the wait
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
        with ExitStack() as running:
            # Whoever waits for its turn keeps the others from starting another test before it.
            with locked(self._waiting, fcntl.LOCK_EX):
                running.enter_context(locked(self._running, kind))
            return (yield)


@contextmanager
def locked(path: Path, kind: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, kind)
        yield
