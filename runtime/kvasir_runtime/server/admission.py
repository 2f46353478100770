"""Which requests are let in: none once the server drains, and how many are being answered by all API processes.

The state lies in the shared rows, so every process drains when one is told to and each can report the sum.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir_runtime.errors import ServerUnavailableError
from kvasir_runtime.metrics import DRAINING, IN_FLIGHT, SharedRows
from kvasir_runtime.server.errors import error_response

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class Admission:
    def __init__(self, rows: SharedRows, api_index: int) -> None:
        self._rows = rows
        self._row = rows.row(api_index)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        return self._rows.total(DRAINING) > 0

    @property
    def num_in_flight(self) -> int:
        """Of all API processes."""
        return int(self._rows.total(IN_FLIGHT))

    async def wait_idle(self) -> None:
        """Until this process answers no request."""
        await self._is_idle.wait()

    def start_drain(self) -> None:
        self._row[DRAINING] = 1

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count one request while it is answered. Raises ServerUnavailableError while draining."""
        if self.is_draining:
            raise ServerUnavailableError("this server drains and takes no new requests; send it to another replica")
        self._row[IN_FLIGHT] += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._row[IN_FLIGHT] -= 1
            if self._row[IN_FLIGHT] == 0:
                self._is_idle.set()


class AdmissionMiddleware:
    """Around the routes that generate, until the last byte of the answer is out."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in GENERATING_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            with self._admission.admit():
                await self._app(scope, receive, send)
        except ServerUnavailableError as error:
            await error_response(error)(scope, receive, send)
