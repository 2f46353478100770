"""A server that is told to stop: whoever comes meanwhile is answered, and that it is quiet is known."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send
from tests.http.one_connection import GET, Answering, Server

pytestmark = pytest.mark.anyio
POST = b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"


async def test_an_answer_is_waited_for_and_the_next_one_ends_its_connection() -> None:
    may_answer = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await may_answer.wait()
        await Answering(1)(scope, receive, send)

    server = Server(app)
    async with server.connected(POST) as client, server.connected() as late:
        await asyncio.sleep(0)
        server.connections.start_drain()
        quiet = asyncio.create_task(server.connections.until_quiet(0))
        await late.send(POST)
        await asyncio.wait([quiet], timeout=0.05)
        assert not quiet.done()
        may_answer.set()
        assert b"connection: close" in await late.read_until(b"")
        assert b"connection: close" not in await client.read_until(b"x")
        await asyncio.wait_for(quiet, 10)


@pytest.mark.parametrize(("request_bytes", "puts_it_off"), [(POST, True), (GET, False)])
async def test_a_request_puts_the_end_off_and_a_probe_does_not(request_bytes: bytes, puts_it_off: bool) -> None:
    server, loop = Server(Answering(1)), asyncio.get_running_loop()
    server.connections.start_drain()
    quiet = asyncio.create_task(server.connections.until_quiet(0.2))
    begin = loop.time()
    await asyncio.wait([quiet], timeout=0.1)
    async with server.connected(request_bytes) as client:
        await client.read_until(b"")
    await asyncio.wait_for(quiet, 10)
    assert (loop.time() - begin >= 0.3) == puts_it_off
