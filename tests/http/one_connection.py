"""Connections to an application behind the engine's own HTTP protocol, on which either side buffers a few kB."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from kvasir_http.connections import ClientLimits, ConnectionLimits, Connections
from kvasir_http.http_protocol import BoundedHttpProtocol

GET = b"GET / HTTP/1.1\r\n\r\n"


class Answering:
    """An application whose every answer is so large, and that counts them."""

    def __init__(self, num_bytes: int) -> None:
        self.num_answered = 0
        self._num_bytes = num_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = b"%d" % self._num_bytes
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": b"x" * self._num_bytes})
        self.num_answered += 1


class Server:
    def __init__(
        self,
        app: ASGIApp,
        *,
        max_connections: int = 9,
        limits: ClientLimits | None = None,
        protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol,
    ) -> None:
        self._config = uvicorn.Config(app, lifespan="off", log_config=None)
        self.connections = Connections(ConnectionLimits(max_connections, max_connections))
        self._limits = limits or ClientLimits()
        self._protocol_type = protocol
        self._state = ServerState()

    @property
    def num_connections(self) -> int:
        """Those whose loss nobody has been told."""
        return len(self._state.connections)

    @asynccontextmanager
    async def connected(self, first: bytes = b"") -> AsyncIterator["Client"]:
        """And sends what comes first."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        theirs.setblocking(False)
        with theirs:
            transport, _ = await loop.connect_accepted_socket(lambda: self._protocol(loop), ours)
            client = Client(theirs, transport, loop)
            if first:
                await client.send(first)
            yield client

    def _protocol(self, loop: asyncio.AbstractEventLoop) -> BoundedHttpProtocol:
        return self._protocol_type(
            connections=self.connections,
            limits=self._limits,
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=loop,
        )


class Client:
    def __init__(
        self, connection: socket.socket, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.transport = transport
        """The server's."""
        self._connection = connection
        self._loop = loop

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(10):
            await self._loop.sock_sendall(self._connection, data)

    async def read_until(self, end: bytes) -> bytes:
        """Or to the connection's end, where `end` is empty."""
        received = b""
        async with asyncio.timeout(10):
            while not end or end not in received:
                chunk = await self._loop.sock_recv(self._connection, 65536)
                if not chunk:
                    assert not end, f"the server has closed after {received!r}"
                    break
                received += chunk
        return received

    def end_sending(self) -> None:
        self._connection.shutdown(socket.SHUT_WR)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
