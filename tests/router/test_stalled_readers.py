"""A client that asks and does not read costs a bounded buffer for a bounded time, wherever in the answer it stops."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from tests.router.test_http_semantics import RawEngine
from uvicorn.server import ServerState

from kvasir_http.connections import ConnectionLimits, Connections
from kvasir_router.dialects.chat import Chat
from kvasir_router.errors import RequestError
from kvasir_router.relay.body import Body, BodyBudget, ClientTimes
from kvasir_router.relay.exchange import Exchange
from kvasir_router.relay.http_protocol import Forwarding, ForwardingHttpProtocol
from kvasir_router.relay.upstream_answer import IdleTimeouts, UpstreamAnswer

pytestmark = [pytest.mark.anyio, pytest.mark.alone]
STREAMED = b'{"model":"tiny","stream":true,"messages":[]}'
WHOLE = b'{"model":"tiny","messages":[]}'


IMPATIENT = {"clients": ClientTimes(reader_seconds=0.3)}


@asynccontextmanager
async def asked_by_a_stalled_reader(router: Any, body: bytes, *, headers: bytes = b"") -> AsyncIterator[socket.socket]:
    """Its receive buffer takes a few kB, and nobody empties it."""
    host, port = router.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n%s\r\n" % (len(body), headers)
        await loop.sock_sendall(client, head + body)
        yield client


def state(router: Any) -> dict[str, float]:
    wanted = ("kvasir_router_in_flight", "kvasir_router_connections")
    lines = (line.split() for line in router.metrics.render().decode().splitlines())
    return {name: float(value) for name, value in (line for line in lines if line[0] in wanted)}


NOTHING_HELD = {"kvasir_router_in_flight": 0.0, "kvasir_router_connections": 0.0}


async def test_a_stream_that_is_not_read_is_aborted_at_the_engine(engine: Any, start_router: Any, until: Any) -> None:
    router = await start_router(engine, tuned=IMPATIENT)
    engine.num_tokens = 10**9
    async with asked_by_a_stalled_reader(router, STREAMED):
        await asyncio.wait_for(engine.aborted.wait(), 10)
        await until(lambda: state(router) == NOTHING_HELD)
        assert router.services.describe()[0]["num_in_flight"] == 0


async def test_an_answer_that_is_not_read_to_its_end_frees_its_slot(engine: Any, start_router: Any, until: Any) -> None:
    router = await start_router(engine, tuned=IMPATIENT)
    engine.num_tokens = 10**6
    async with asked_by_a_stalled_reader(router, WHOLE):
        await engine.wait_for_requests(1)
        await until(lambda: state(router) == NOTHING_HELD)
        assert router.services.describe()[0]["num_in_flight"] == 0


class LargeAnswer(RawEngine):
    """Counts what is taken of it."""

    num_bytes = 200_000_000

    def __init__(self) -> None:
        super().__init__(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self.num_bytes)
        self.num_taken = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer_to(head, reader))
                while head.startswith(b"POST") and self.num_taken < self.num_bytes:
                    writer.write(b"x" * 50_000)
                    await writer.drain()
                    self.num_taken += 50_000
        writer.close()


async def test_an_engine_waits_for_a_reader_that_stands_still_and_goes_on_with_it(
    start_router: Any, exit_stack: AsyncExitStack
) -> None:
    engine = await LargeAnswer().start(exit_stack)
    router = await start_router(engine)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60), asked_by_a_stalled_reader(router, WHOLE) as client:
        num_before = -1
        while num_before < engine.num_taken or engine.num_taken == 0:
            num_before = engine.num_taken
            await asyncio.sleep(0.5)
        assert engine.num_taken < 64_000_000
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        received = await loop.sock_recv(client, 2**16)
        num_left = received.index(b"\r\n\r\n") + 4 + engine.num_bytes - len(received)
        while num_left > 0:
            chunk = await loop.sock_recv(client, 2**20)
            assert chunk, "the router has closed"
            num_left -= len(chunk)
    assert (num_left, engine.num_taken) == (0, engine.num_bytes)


class FakeFlow:
    def __init__(self) -> None:
        self.is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None:
        """Nothing to be told."""


async def test_the_answer_that_goes_on_for_another_waits_for_a_reader_that_stood_still_before(until: Any) -> None:
    writer = SimpleNamespace(write=lambda chunk: None)
    exchange = Exchange("/chat", [], Chat(), Body(BodyBudget(1), 1), cast(Any, writer))
    exchange.hold_back()
    flow, written = FakeFlow(), list[bytes]()
    loop = asyncio.get_running_loop()
    with contextlib.closing(IdleTimeouts(60.0, loop)) as idle_timeouts:
        answer = UpstreamAnswer("http://engine", flow, idle_timeouts, loop)
        relayed = asyncio.create_task(exchange.relay(answer, written.append))
        await until(lambda: flow.is_paused)
        exchange.go_on()
        assert not flow.is_paused
        answer.feed(b"rest")
        answer.end()
        await relayed
    assert written == [b"rest"]


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """Is asked for nothing."""


class Server:
    """One connection to an application, on which either side buffers a few kB."""

    def __init__(self, reader_seconds: float = 0.3) -> None:
        self.times = ClientTimes(reader_seconds=reader_seconds)
        self.connections = Connections(ConnectionLimits(9, 9))

    @asynccontextmanager
    async def asked(
        self, app: Any = nothing, *, handle: Any = None, request: bytes = b"GET / HTTP/1.1\r\n\r\n"
    ) -> AsyncIterator[socket.socket]:
        """An ASGI application, or what handles requests that are forwarded."""
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        forwarding = Forwarding({"/chat": Chat()}, handle, BodyBudget(10**6), 10**6) if handle is not None else None
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        theirs.setblocking(False)
        with theirs:
            await loop.connect_accepted_socket(
                lambda: ForwardingHttpProtocol(
                    connections=self.connections,
                    forwarding=forwarding,
                    limits=self.times,
                    config=config,
                    server_state=ServerState(),
                    app_state={},
                    _loop=loop,
                ),
                ours,
            )
            await loop.sock_sendall(theirs, request)
            yield theirs


@pytest.mark.parametrize("is_broken", [True, False])
async def test_neither_the_end_nor_the_error_that_ends_a_stream_is_waited_for(is_broken: bool, until: Any) -> None:
    has_ended = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-type", b"text/event-stream")])
        exchange.write(b"x" * 200_000)
        exchange.fail(RequestError("the engine is gone")) if is_broken else exchange.end()
        has_ended.set()

    server = Server()
    async with server.asked(handle=handle, request=b"POST /chat HTTP/1.1\r\ncontent-length: 0\r\n\r\n"):
        await asyncio.wait_for(has_ended.wait(), 5)
        await until(lambda: len(server.connections) == 0)
