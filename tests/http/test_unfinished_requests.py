"""A client that does not end what it has begun, before its answer or after, holds its connection for a time only."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send
from tests.http.one_connection import GET, Server, until

from kvasir_http.connections import ClientLimits

pytestmark = pytest.mark.anyio
BEGUN = b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\n1"
REST = b"234"
BROKEN = b"no number\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


class Unread:
    """An application that answers at once, and may want to see no more of its client."""

    def __init__(self, *, closes: bool = False) -> None:
        self._headers = [(b"content-length", b"2"), *([(b"connection", b"close")] if closes else [])]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": b"OK"})


async def test_the_rest_of_a_body_that_was_not_wanted_does_not_come_for_ever() -> None:
    async with Server(Unread(), limits=ClientLimits(head_seconds=0.1)).connected(BEGUN) as client:
        received = await client.read_until(b"")
    assert received.count(b"\r\n\r\n") == 1, "nothing but the one answer"


async def test_after_the_rest_of_a_body_that_was_not_wanted_the_next_request_is_answered() -> None:
    async with Server(Unread()).connected(BEGUN) as client:
        await client.read_until(b"OK")
        await client.send(REST + GET)
        await client.read_until(b"OK")


async def test_after_the_rest_of_a_body_that_was_not_wanted_a_connection_is_idle() -> None:
    async with Server(Unread(), limits=ClientLimits(keep_alive_seconds=0.1)).connected(BEGUN) as client:
        await client.read_until(b"OK")
        await client.send(REST)
        assert await client.read_until(b"") == b""


async def test_who_ends_its_side_within_a_body_has_left() -> None:
    server = Server(Unread())
    async with server.connected(BEGUN) as client:
        await client.read_until(b"OK")
        client.end_sending()
        await until(lambda: server.num_connections == 0)


async def test_lines_that_are_no_request_do_not_keep_a_connection() -> None:
    async with Server(Unread(), limits=ClientLimits(head_seconds=0.1)).connected(GET) as client:
        await client.read_until(b"OK")
        await client.send(b"\r\n")
        assert await client.read_until(b"") == b""


async def test_who_is_told_that_the_connection_closes_can_send_on_for_a_time_only() -> None:
    server = Server(Unread(closes=True), limits=ClientLimits(linger_seconds=0.1))
    async with server.connected(BEGUN) as client:
        await client.read_until(b"")
        await until(lambda: server.num_connections == 0)


@pytest.mark.parametrize("closes", [False, True], ids=["keep-alive", "close"])
async def test_who_sent_faster_than_it_was_read_can_send_the_rest_when_it_is_answered(closes: bool) -> None:
    may_answer = asyncio.Event()

    async def answer_later(scope: Scope, receive: Receive, send: Send) -> None:
        await may_answer.wait()
        await Unread(closes=closes)(scope, receive, send)

    num_bytes = 1_000_000
    server = Server(answer_later, limits=ClientLimits(linger_seconds=60.0))
    async with server.connected(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % num_bytes) as client:
        sending = asyncio.create_task(client.send(b" " * num_bytes))
        await until(lambda: not client.transport.is_reading())
        may_answer.set()
        await sending
        await client.read_until(b"OK")
        if not closes:
            await client.send(GET)
            await client.read_until(b"OK")


async def test_who_is_told_that_the_connection_closes_can_send_so_much_only() -> None:
    server = Server(Unread(closes=True), limits=ClientLimits(linger_seconds=60.0, linger_bytes=100_000))
    async with server.connected(b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n") as client:
        await client.read_until(b"")
        await client.send(b" " * 100_000)
        assert server.num_connections == 1
        with pytest.raises(ConnectionError):
            await client.send(b" " * 1_000_000)


async def test_an_application_learns_that_its_client_was_refused() -> None:
    """In the middle of the body that it waits for; what it answers then is not sent."""
    seen: list[str] = []

    async def wait_for_body(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append("head")
        seen.append((await receive())["type"])
        await Unread()(scope, receive, send)

    async with Server(wait_for_body).connected(CHUNKED) as client:
        await until(lambda: seen == ["head"])
        await client.send(BROKEN)
        received = await client.read_until(b"")
        await until(lambda: seen == ["head", "http.disconnect"])
    assert b" 400 " in received
    assert received.count(b"\r\n\r\n") == 1


async def test_a_refusal_is_not_sent_where_another_answer_has_begun() -> None:
    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with Server(wait).connected(CHUNKED) as client:
        await client.read_until(b"\r\n\r\n")
        await client.send(BROKEN)
        assert await client.read_until(b"") == b""


async def test_what_was_asked_before_nonsense_is_answered_before_its_refusal() -> None:
    async with Server(Unread()).connected(GET + BROKEN) as client:
        received = await client.read_until(b"")
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"OKHTTP/1.1 400 Bad Request\r\n" in received


async def test_what_was_answered_before_its_broken_end_came_is_not_answered_again() -> None:
    async with Server(Unread()).connected(CHUNKED) as client:
        await client.read_until(b"OK")
        await client.send(BROKEN)
        assert await client.read_until(b"") == b""


async def test_who_is_refused_and_stays_makes_way() -> None:
    server = Server(Unread(), max_connections=1, limits=ClientLimits(linger_seconds=60.0))
    async with server.connected(CHUNKED + BROKEN) as client:
        await client.read_until(b"")
        async with server.connected(GET) as another:
            await another.read_until(b"OK")


FRAMED = {b"1.0": b"\r\n\r\nab", b"1.1": b"\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n"}


@pytest.mark.parametrize("version", FRAMED)
async def test_a_stream_comes_in_chunks_to_those_alone_who_know_them(version: bytes) -> None:
    """RFC 9112 section 6.1."""

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"a", b"b", b""):
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})

    head = b"GET / HTTP/%b\r\nConnection: close\r\n\r\n" % version
    async with Server(stream).connected(head) as client:
        assert await client.read_until(b"") == b"HTTP/1.1 200 OK\r\nconnection: close" + FRAMED[version]


async def test_trailers_are_no_headers() -> None:
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.extend(name for name, _ in scope["headers"])
        await Unread()(scope, receive, send)

    async with Server(app).connected(CHUNKED + b"1\r\na\r\n0\r\nX-Forged: 1\r\n\r\n") as client:
        await client.read_until(b"OK")
    assert seen == [b"transfer-encoding"]
