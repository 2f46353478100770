"""Which requests are let in: none once the server refuses them, and no more sequences than the engine is to hold.

The state lies in shared rows, so every process drains when one is told to and each knows the sum of all.
"""

import asyncio
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir_runtime.errors import ServerUnavailableError
from kvasir_runtime.server.errors import error_response
from kvasir_runtime.shared_rows import SharedRows

# The layout of a row. The server drains, and refuses, when any row says so.
DRAINING, REFUSING, REQUESTS, SEQUENCES = range(NUM_SLOTS := 4)


class Admission:
    """Of one API process; `max_sequences` is for all of them together."""

    def __init__(self, ipc_dir: Path, api_server_count: int, api_index: int, max_sequences: int) -> None:
        self._rows = SharedRows(ipc_dir / "admission", api_server_count, NUM_SLOTS)
        self._row = self._rows.row(api_index)
        self._max_sequences = max_sequences
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        """Whoever asks whether the server is ready is told that it is not."""
        return self._rows.total(DRAINING) > 0

    @property
    def is_refusing(self) -> bool:
        return self._rows.total(REFUSING) > 0

    @property
    def num_in_flight(self) -> int:
        """Requests of all API processes."""
        return int(self._rows.total(REQUESTS))

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
        num_held = int(self._rows.total(SEQUENCES))
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


class AdmissionMiddleware:
    """Around the routes of these paths, which the engine works for, until the last byte of the answer is out."""

    def __init__(self, app: ASGIApp, admission: Admission, paths: Set[str]) -> None:
        self._app = app
        self._admission = admission
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        try:
            with self._admission.admit():
                await self._app(scope, receive, send)
        except ServerUnavailableError as error:
            await error_response(error)(scope, receive, send)
