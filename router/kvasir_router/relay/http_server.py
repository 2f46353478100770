"""A server on a bound socket, and how it ends: it serves what is still asked, then the rest, then closes."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from kvasir_http.connections import Connections
from kvasir_http.sockets import BACKLOG, bound_socket
from kvasir_router.errors import PortInUseError, StartupError
from kvasir_router.relay.body import CLIENT_TIMES, ClientTimes
from kvasir_router.relay.http_protocol import Forwarding, ForwardingHttpProtocol

_LOOK_SECONDS = 0.01


@contextlib.contextmanager
def listening(host: str, port: int, flag: str) -> Iterator[socket.socket]:
    """Raises PortInUseError, or StartupError for any other reason. `flag` is what to change then."""
    try:
        listener = bound_socket(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"{host}:{port} is in use; choose another port with {flag}") from error
        raise StartupError(f"cannot listen on {host}:{port} ({flag}): {error}") from error
    with listener:
        listener.listen(BACKLOG)
        yield listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without two habits: taking over the signals, and waking ten times a second to look for an end."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, delay_seconds: float, timeout_seconds: float
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._delay_seconds = delay_seconds
        self._timeout_seconds = timeout_seconds
        self._stop = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Half of the time for what clients still ask, so that the answers which then begin have the other half."""
        self._connections.start_drain()
        try:
            async with asyncio.timeout(self._delay_seconds + self._timeout_seconds):
                await self._until_quiet()
                for server in self.servers:
                    server.close()
                for connection in list(self.server_state.connections):
                    connection.shutdown()
                await self._ended()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
            for server in self.servers:
                server.close()

    async def _until_quiet(self) -> None:
        try:
            async with asyncio.timeout(self._delay_seconds + self._timeout_seconds / 2):
                await self._connections.until_quiet(self._delay_seconds)
        except TimeoutError:
            self._connections.is_refusing = True
            await self._connections.until_quiet(0)

    async def _ended(self) -> None:
        """As uvicorn does it, but it looks ten times as often: most servers end at once."""
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def http_server(
    app: ASGIApp,
    listener: socket.socket,
    connections: Connections,
    forwarding: Forwarding | None = None,
    *,
    shutdown_delay_seconds: float = 0.0,
    shutdown_timeout_seconds: float,
    times: ClientTimes = CLIENT_TIMES,
) -> AsyncIterator[None]:
    """Serves while the block runs: what `forwarding` names as bytes, everything else by `app`. Drains at its end."""
    protocol = partial(ForwardingHttpProtocol, connections=connections, forwarding=forwarding, limits=times)
    config = uvicorn.Config(
        app,
        loop="none",
        http=cast(Any, protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,  # an engine's own headers pass through unchanged
    )
    server = _Server(config, connections, shutdown_delay_seconds, shutdown_timeout_seconds)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]), name="http server")
        try:
            yield
        finally:
            server.stop()
