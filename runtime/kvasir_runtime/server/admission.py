"""What a server takes at once: no requests once it refuses them, and no more sequences than the engine is to hold, nor
more bytes of bodies than one process.

The state lies in shared rows, so every process drains when one is told to and each knows the sum of all.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvasir_http.connections import ClientLimits
from kvasir_runtime.errors import ServerUnavailableError
from kvasir_runtime.shared_rows import SharedRows

# The layout of a row. The server drains, and refuses, when any row says so.
DRAINING, REFUSING, REQUESTS, SEQUENCES = range(NUM_SLOTS := 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits(ClientLimits):
    """How long a client of the engine may take, and what a process holds for all, beside what `kvasir_http` says."""

    body_seconds: float = 60.0
    """For all of a body: 8 MiB at 1.1 Mbit/s."""
    held_bytes: int = 1024 * 1024 * 1024
    """Of all bodies together, but two of the largest in any case: 256 KiB, which are the tokens of a long conversation,
    for each connection that a process takes."""


API_LIMITS = ApiLimits()


class Admission:
    """Of one API process; `max_sequences` is for all of them together."""

    def __init__(self, ipc_dir: Path, api_server_count: int, api_index: int, max_sequences: int) -> None:
        rows = SharedRows(ipc_dir / "admission", api_server_count, NUM_SLOTS)
        self._row = rows.row(api_index)
        self._draining, self._refusing, self._requests, self._sequences = map(rows.column, range(NUM_SLOTS))
        self._max_sequences = max_sequences
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        """Whoever asks whether the server is ready is told that it is not."""
        return any(self._draining)

    @property
    def is_refusing(self) -> bool:
        return any(self._refusing)

    @property
    def num_in_flight(self) -> int:
        """Requests of all API processes."""
        return int(sum(self._requests))

    async def wait_idle(self) -> None:
        """Until this process answers no request."""
        await self._is_idle.wait()

    def start_drain(self) -> None:
        self._row[DRAINING] = 1

    def refuse(self) -> None:
        """Those that come from now on; a server that refuses drains."""
        self._row[DRAINING] = self._row[REFUSING] = 1

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count one request while it is answered. Raises ServerUnavailableError where it is refused."""
        if self.is_refusing:
            raise ServerUnavailableError("this server drains and takes no new requests; send it to another replica")
        self._row[REQUESTS] += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._row[REQUESTS] -= 1
            if self._row[REQUESTS] == 0:
                self._is_idle.set()

    @contextmanager
    def hold(self, num_sequences: int) -> Iterator[None]:
        """Count a request's sequences while the engine has them. Raises ServerUnavailableError where it has enough."""
        num_held = int(sum(self._sequences))
        if num_held + num_sequences > self._max_sequences:
            raise ServerUnavailableError(
                f"this engine works on {num_held} sequences and takes no more than {self._max_sequences} "
                "(--max-sequences-in-flight); send the request to another replica, or later"
            )
        self._row[SEQUENCES] += num_sequences
        try:
            yield
        finally:
            self._row[SEQUENCES] -= num_sequences


def forget_process(ipc_dir: Path, api_server_count: int, api_index: int) -> None:
    """What an API process that has died was answering counts no more."""
    row = SharedRows(ipc_dir / "admission", api_server_count, NUM_SLOTS).row(api_index)
    row[REQUESTS] = row[SEQUENCES] = 0


class BodyBudget:
    """What all bodies that one API process holds may have together, whoever sends them and however slowly they come.

    A body counts from its first byte until its request is answered, since what is made of it is held as long and is no
    smaller. The body that would be too much is answered with 503 at once; what still comes of it is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises ServerUnavailableError, and takes nothing, where that is too much."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise ServerUnavailableError(
                f"this server holds {self.num_bytes} bytes of requests and takes no more than {self._max_bytes}; "
                "send the request to another replica, or later"
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
