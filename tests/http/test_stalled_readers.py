"""A client that asks and does not read costs a bounded buffer for a bounded time, wherever in the answer it stops."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from starlette.types import Receive, Scope, Send
from tests.http.one_connection import GET, Answering, Server, until

from kvasir_http.connections import UNCOUNTED_BYTES, ClientLimits, ClientTransport

pytestmark = [pytest.mark.anyio, pytest.mark.alone]
CLOSING = b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"
FULL, A_LITTLE = 1_000_000, 11_000
"""Bytes of an answer: many more than are buffered, and too few for anybody but the transport to wait for."""
IMPATIENT = ClientLimits(reader_seconds=0.3)
READER_BYTES = ClientLimits().reader_bytes


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


class Stream:
    """An application that sends for ever, and notes when its client has left."""

    def __init__(self) -> None:
        self.has_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        sending.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            await asyncio.sleep(0)


async def test_who_answers_learns_that_its_client_stands_still() -> None:
    app = Stream()
    server = Server(app, limits=IMPATIENT)
    async with server.connected(GET):
        await until(lambda: app.has_left)
        await until(lambda: server.num_connections == 0)


@pytest.mark.parametrize("num_bytes", [FULL, A_LITTLE])
async def test_a_connection_that_is_to_close_does_not_wait_for_its_reader_for_ever(num_bytes: int) -> None:
    app = Answering(num_bytes)
    server = Server(app, limits=IMPATIENT)
    async with server.connected(CLOSING):
        await until(lambda: app.num_answered == 1)
        await until(lambda: server.num_connections == 0)


async def test_a_client_that_ends_its_side_and_does_not_read_is_not_waited_for_either() -> None:
    app = Answering(A_LITTLE)
    server = Server(app, limits=IMPATIENT)
    async with server.connected(GET) as client:
        await until(lambda: app.num_answered == 1)
        client.end_sending()
        await until(lambda: server.num_connections == 0)


async def test_who_answers_learns_at_once_that_its_client_has_ended_its_side() -> None:
    app = Stream()
    async with Server(app).connected(GET) as client:
        await until(lambda: client.transport.get_write_buffer_size() > UNCOUNTED_BYTES)
        client.end_sending()
        await until(lambda: app.has_left)


async def test_an_idle_connection_that_was_not_read_makes_way_at_once() -> None:
    app = Answering(A_LITTLE)
    server = Server(app, max_connections=1)
    async with server.connected(GET):
        await until(lambda: app.num_answered == 1)
        async with server.connected(GET):
            await until(lambda: app.num_answered == 2)
            await until(lambda: server.num_connections == 1)


@pytest.mark.parametrize("request_", [GET, CLOSING], ids=["keep-alive", "close"])
async def test_a_connection_is_not_idle_while_most_of_its_answer_is_to_be_read(request_: bytes) -> None:
    app = Answering(FULL)
    server = Server(app, max_connections=1)
    async with server.connected(request_) as busy:
        await until(lambda: app.num_answered == 1)
        async with server.connected() as refused:
            assert b" 503 " in await refused.read_until(b"")
        await busy.read_until(b"x" * FULL)
        async with server.connected(GET) as accepted:
            await accepted.read_until(b"x" * FULL)


@pytest.mark.parametrize(("request_", "num_answers"), [(b"GET", 0), (GET, 0), (GET, 1), (CLOSING, 1)])
@pytest.mark.parametrize("num_bytes", [FULL, A_LITTLE])
async def test_nothing_is_left_of_a_client_that_has_left(request_: bytes, num_answers: int, num_bytes: int) -> None:
    """No timer holds it, neither while it is asking nor with an answer that it has not read."""
    app = Answering(num_bytes)
    async with Server(app).connected(request_) as client:
        await until(lambda: app.num_answered >= num_answers)
        protocol, transport = weakref.ref(client.transport.get_protocol()), weakref.ref(client.transport)
        del client
    await until(lambda: gc.collect() >= 0 and protocol() is None and transport() is None)


async def test_a_reader_that_has_taken_everything_is_not_looked_at_any_more() -> None:
    server = Server(Answering(FULL), limits=ClientLimits(reader_seconds=0.3, reader_bytes=1))
    async with server.connected(GET) as reader:
        await reader.read_until(b"x" * FULL)
        for _ in range(2):
            async with server.connected(GET):
                await until(lambda: server.num_connections == 2)
                await until(lambda: server.num_connections == 1)
        await reader.send(GET)
        await reader.read_until(b"x" * FULL)


class Timer:
    """Goes off when the test says so."""

    def __init__(self, seconds: float, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def go_off(self) -> None:
        if self._callback is not None:
            self._callback()


class Reader:
    """A client that takes what the test says, its transport, and the one timer that looks at it."""

    def __init__(self, num_unsent_bytes: int) -> None:
        self.num_unsent_bytes = num_unsent_bytes
        self.is_cut_off = False
        self.timer = Timer(0.0, lambda: None)
        loop = SimpleNamespace(call_later=self._start_timer)
        self.transport = ClientTransport(
            cast(asyncio.Transport, self), cast(asyncio.AbstractEventLoop, loop), ClientLimits()
        )

    def takes(self, num_bytes: int) -> None:
        self.num_unsent_bytes -= num_bytes
        self.timer.go_off()

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> Timer:
        self.timer = Timer(seconds, callback)
        return self.timer

    def get_write_buffer_size(self) -> int:
        return self.num_unsent_bytes

    def abort(self) -> None:
        self.is_cut_off = True

    def is_closing(self) -> bool:
        return False

    write = close = pause_reading = resume_reading = get_extra_info = lambda *_: None


def test_a_large_answer_is_given_as_long_as_it_takes_at_the_least_speed() -> None:
    reader = Reader(3 * READER_BYTES)
    reader.transport.watch_reader()
    for _ in range(2):
        reader.takes(READER_BYTES)
        assert not reader.is_cut_off
    reader.takes(READER_BYTES - 1)
    assert reader.is_cut_off


def test_a_reader_that_has_made_room_has_all_its_time_the_next_time() -> None:
    reader = Reader(70_000)
    reader.transport.watch_reader()
    first_timer = reader.timer
    reader.transport.unwatch_reader()
    reader.transport.watch_reader()
    first_timer.go_off()
    assert not reader.is_cut_off
    reader.takes(0)
    assert reader.is_cut_off


def test_a_reader_that_has_made_room_is_to_take_the_rest_as_well_where_that_is_the_last() -> None:
    reader = Reader(70_000)
    reader.transport.watch_reader()
    reader.transport.close()
    reader.transport.unwatch_reader()
    reader.takes(60_000)
    assert reader.is_cut_off
