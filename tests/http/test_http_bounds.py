"""What one client sends before it is answered, and how long it takes, has bounds; and others are served meanwhile."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send
from tests.http.one_connection import GET, Client, Server, until

from kvasir_http.connections import ClientLimits
from kvasir_http.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS

pytestmark = [pytest.mark.anyio, pytest.mark.alone]
CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
HASTY = ClientLimits(head_seconds=0.1, keep_alive_seconds=0.8)


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers once it has read its body."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"OK"})


async def status_of(head: bytes) -> bytes:
    async with Server(read_all).connected(b"GET / HTTP/1.1\r\nConnection: close\r\n%b\r\n" % head) as client:
        return (await client.read_until(b"")).split()[1]


async def test_a_head_of_the_greatest_size_is_taken_and_one_byte_more_refused() -> None:
    size = MAX_HEAD_BYTES - len("/" + "Connection" + "close" + "X")
    assert await status_of(b"X: " + b"a" * size + b"\r\n") == b"200"
    assert await status_of(b"X: " + b"a" * (size + 1) + b"\r\n") == b"431"


async def test_as_many_headers_as_allowed_are_taken_and_one_more_refused() -> None:
    assert await status_of(b"X: a\r\n" * (MAX_HEADERS - 1)) == b"200"
    assert await status_of(b"X: a\r\n" * MAX_HEADERS) == b"431"


async def test_each_request_of_a_connection_may_have_as_many_headers() -> None:
    async with Server(read_all).connected() as client:
        for _ in range(2):
            await client.send(b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * MAX_HEADERS + b"\r\n")
            await client.read_until(b"OK")


@pytest.mark.parametrize(
    ("beginning", "filling"),
    [
        (b"GET / HTTP/1.1\r\nX: ", b"a"),
        (b"GET / HTTP/1.1\r\n", b"a"),
        (b"GET /", b"a"),
        (CHUNKED + b"5;", b"a"),
        (CHUNKED + b"0\r\nX: ", b"a"),
        (b"", b"\r\n"),
    ],
    ids=["header", "name", "path", "chunk extension", "trailer", "nothing"],
)
async def test_nothing_without_end_is_taken_in(beginning: bytes, filling: bytes) -> None:
    """A server that took all would see the whole of it sent."""
    server = Server(read_all, limits=ClientLimits(linger_bytes=MAX_HEAD_BYTES))
    async with server.connected(beginning) as client:
        with pytest.raises(ConnectionError):
            await client.send(filling * (50 * MAX_HEAD_BYTES))
        await until(lambda: server.num_connections == 0)


async def test_others_are_served_while_a_head_without_end_is_sent() -> None:
    server = Server(read_all)

    async def flood(client: Client) -> None:
        with pytest.raises(ConnectionError):
            await client.send(b"X: " + b"a" * 50 * 2**20)

    async with server.connected(b"GET / HTTP/1.1\r\n") as first, server.connected() as other:
        flooding = asyncio.create_task(flood(first))
        for _ in range(10):
            await other.send(GET)
            await other.read_until(b"OK")
        await flooding


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("sent", "is_answered"), [(b"", False), (b"\r\n", False), (b"GET / HT", True), (b"GET / HTTP/1.1\r\nX: ", True)]
)
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes, is_answered: bool, is_first: bool) -> None:
    async with Server(read_all, limits=HASTY).connected() as client:
        if not is_first:
            await client.send(GET)
            await client.read_until(b"OK")
        if sent:
            await client.send(sent)
        received = await client.read_until(b"")
    assert (b" 408 " in received and b"head_timeout" in received) if is_answered else received == b""


async def test_a_connection_is_kept_between_requests() -> None:
    """A pool's idle time is longer than the time for a head."""
    server = Server(read_all, limits=HASTY)
    async with server.connected(GET) as kept, server.connected() as silent:
        await kept.read_until(b"OK")
        assert await silent.read_until(b"") == b"", "so that time is over"
        await kept.send(GET)
        await kept.read_until(b"OK")


async def test_what_is_no_http_is_told_so_in_openais_shape() -> None:
    async with Server(read_all).connected(b"SSH-2.0-OpenSSH\r\n") as client:
        received = await client.read_until(b"")
    assert received.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b'{"error":{"message":"this is no HTTP/1.1 request","type":"invalid_request_error"' in received
    assert b'"code":"malformed_http"' in received
