"""What a client sends ahead of its turn waits for it, costs little, and hides nothing, least of all that it leaves."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send
from tests.http.one_connection import GET, Server, until

from kvasir_http.connections import ClientLimits
from kvasir_http.http_protocol import MAX_HEAD_BYTES, SLICE_BYTES, BoundedHttpProtocol

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


class Echo:
    """An application that answers with path and body, once the test lets it, and counts what it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_left = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        leaving = asyncio.create_task(receive())
        answering = asyncio.create_task(self.may_answer.wait())
        await asyncio.wait((leaving, answering), return_when=asyncio.FIRST_COMPLETED)
        answering.cancel()
        if leaving.done():
            self.num_left += 1
            return
        content = b"[%s %s]" % (scope["raw_path"], body)
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]}
        )
        await send({"type": "http.response.body", "body": content})
        await leaving


def post(path: bytes, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (path, len(body), body)


async def test_a_client_that_leaves_leaves_none_of_its_requests_behind() -> None:
    app = Echo()
    server = Server(app)
    async with server.connected(GET * 3):
        await until(lambda: app.num_asked == 1)
    await until(lambda: app.num_left == 1 and server.num_connections == 0)
    assert app.num_asked == 1


async def test_requests_are_answered_in_their_order_one_at_a_time() -> None:
    app = Echo()
    async with Server(app).connected(post(b"/1", b"a") + post(b"/2", b"b") + GET.replace(b"/", b"/3", 1)) as client:
        await until(lambda: app.num_asked == 1)
        app.may_answer.set()
        received = await client.read_until(b"[/3 ]")
    assert received.index(b"[/1 a]") < received.index(b"[/2 b]") < received.index(b"[/3 ]")


@pytest.mark.parametrize("size", [1, 1000, SLICE_BYTES, 3 * MAX_HEAD_BYTES])
@pytest.mark.parametrize("num_first", [0, 1, SLICE_BYTES, 2 * SLICE_BYTES + 1])
async def test_a_body_comes_whole_wherever_it_was_when_the_answer_before_it_ended(size: int, num_first: int) -> None:
    app = Echo()
    ahead = post(b"/2", b"b" * size) + post(b"/3", b"c" * size)
    async with Server(app).connected(post(b"/1", b"a") + ahead[:num_first]) as client:
        await until(lambda: app.num_asked == 1)
        sending = asyncio.create_task(client.send(ahead[num_first:]))
        await asyncio.sleep(0)
        app.may_answer.set()
        received = await client.read_until(b"[/3 " + b"c" * size + b"]")
        await sending
    assert b"[/2 " + b"b" * size + b"]" in received


async def test_a_body_in_chunks_comes_whole_however_much_is_read_at_once() -> None:
    app = Echo()
    app.may_answer.set()
    chunk = b"%x\r\n%s\r\n" % (3 * SLICE_BYTES, b"b" * 3 * SLICE_BYTES)
    chunked = b"POST /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%s%s0\r\n\r\n" % (chunk, chunk)
    async with Server(app).connected(chunked + post(b"/2", b"c")) as client:
        received = await client.read_until(b"[/2 c]")
    assert b"[/1 %s]" % (b"b" * 6 * SLICE_BYTES) in received


LONG_GET = b"GET / HTTP/1.1\r\nX: %s\r\n\r\n" % (b"x" * 2000)


@pytest.mark.parametrize("ahead", [post(b"/", b"b" * 1_000_000), LONG_GET * 500], ids=["body", "heads"])
async def test_who_sends_ahead_of_its_turn_is_read_no_further_than_a_bound_until_then(ahead: bytes) -> None:
    app = Echo()
    async with Server(app).connected(GET) as client:
        await until(lambda: app.num_asked == 1)
        sending = asyncio.create_task(client.send(ahead + GET.replace(b"/", b"/last", 1)))
        await until(lambda: not client.transport.is_reading())
        app.may_answer.set()
        await client.read_until(b"[/last ]")
        await sending


async def test_a_thousand_requests_at_once_are_not_made_into_objects_before_their_turn() -> None:
    heads: list[bytes] = []

    class Watched(BoundedHttpProtocol):
        def on_url(self, url: bytes) -> None:
            heads.append(url)
            super().on_url(url)

    app = Echo()
    async with Server(app, protocol=Watched).connected(GET * 1000) as client:
        await until(lambda: app.num_asked == 1)
        assert len(heads) <= SLICE_BYTES // len(GET) + 1
        app.may_answer.set()
        received = b""
        while received.count(b"[/ ]") < 1000:
            received += await client.read_until(b"]")
    assert len(heads) == 1000


async def test_a_head_ahead_of_its_turn_has_no_time_until_then() -> None:
    """It may lie in a buffer meanwhile: who sent it is not late."""
    app = Echo()
    server = Server(app, limits=ClientLimits(head_seconds=0.1))
    async with server.connected(GET + b"GET /2") as client:
        await until(lambda: app.num_asked == 1)
        async with server.connected() as silent:
            assert await silent.read_until(b"") == b""
        app.may_answer.set()
        assert b" 200 OK" in await client.read_until(b"[/ ]")
        assert b" 408 " in await client.read_until(b"")
