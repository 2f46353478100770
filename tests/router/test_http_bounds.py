"""What one client sends, and when, has bounds; and others are served meanwhile. Nobody has shown a key yet."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvasir_router.relay.body import ClientTimes

pytestmark = [pytest.mark.anyio, pytest.mark.alone]
CHAT = b"/v1/chat/completions"
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'


class Connection:
    """A client that says what it is told to, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *parts: bytes) -> None:
        """As far as the router takes it."""
        try:
            for part in parts:
                self._writer.write(part)
                await self._writer.drain()
        except ConnectionError:
            return

    async def until_closed(self) -> bytes:
        """What comes before the router closes."""
        received = b""
        try:
            async with asyncio.timeout(10):
                while chunk := await self._reader.read(65536):
                    received += chunk
        except ConnectionError:
            pass
        return received

    async def received(self, text: bytes) -> None:
        async with asyncio.timeout(10):
            await self._reader.readuntil(text)

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """Of the next request; the connection stays."""
        async with asyncio.timeout(10):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = await self._reader.readexactly(int(length.split(b":")[1]))
        return int(head.split()[1]), json.loads(body)


@asynccontextmanager
async def connected(router: Any) -> AsyncIterator[Connection]:
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


def status_and_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def asked(router: Any, *lines: bytes) -> bytes:
    async with connected(router) as connection:
        await connection.send(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n", *lines, b"\r\n")
        return await connection.until_closed()


async def served(router: Any) -> bool:
    return (await asked(router)).startswith(b"HTTP/1.1 200")


def request(body: bytes = BODY, *, path: bytes = CHAT) -> bytes:
    return b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (path, len(body), body)


CHUNKED = b"POST " + CHAT + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_a_head_that_comes_in_time_may_be_followed_by_a_long_answer(start_router: Any, engine: Any) -> None:
    router = await start_router(engine, tuned={"clients": ClientTimes(head_seconds=0.1)})
    engine.token_seconds = 0.1
    async with connected(router) as connection:
        await connection.send(request())
        assert (await connection.answer())[0] == 200


async def test_a_request_begun_during_an_answer_gets_its_time_after_it(start_router: Any, engine: Any) -> None:
    router = await start_router(engine, tuned={"clients": ClientTimes(head_seconds=0.1)})
    engine.token_seconds = 0.1
    async with connected(router) as connection:
        await connection.send(request() + b"GET / HT")
        assert (await connection.answer())[0] == 200
        assert status_and_code(await connection.until_closed()) == (408, "head_timeout")


async def test_a_stalled_body_is_refused(start_router: Any, engine: Any) -> None:
    router = await start_router(engine, tuned={"clients": ClientTimes(body_seconds=0.1)})
    async with connected(router) as connection:
        await connection.send(request()[:-1])
        status, answer = await connection.answer()
        assert await connection.until_closed() == b""
    assert (status, answer["error"]["code"]) == (408, "body_timeout")


async def test_a_slow_body_gets_more_time_with_every_byte(start_router: Any, engine: Any) -> None:
    times = ClientTimes(body_seconds=0.2, body_bytes_per_second=len(BODY))
    router = await start_router(engine, tuned={"clients": times})
    async with connected(router) as connection:
        for byte in request():
            await connection.send(bytes([byte]))
            await asyncio.sleep(0.005)
        assert (await connection.answer())[0] == 200


async def test_a_body_that_goes_on_after_its_answer_ends_the_connection(start_router: Any, engine: Any) -> None:
    router = await start_router(engine, max_body_size=10, tuned={"clients": ClientTimes(head_seconds=0.1)})
    async with connected(router) as connection:
        await connection.send(b"POST " + CHAT + b" HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        assert (await connection.answer())[0] == 413
        trickle = asyncio.create_task(trickled(connection))
        assert await connection.until_closed() == b""
        trickle.cancel()


async def trickled(connection: Connection) -> None:
    while True:
        await connection.send(b"x")
        await asyncio.sleep(0.01)


async def test_an_answer_that_has_begun_is_not_mixed_with_a_refusal(start_router: Any, engine: Any) -> None:
    router = await start_router(engine)
    engine.later_gate.clear()
    async with connected(router) as connection:
        await connection.send(request(BODY[:-1] + b',"stream":true}'))
        await connection.received(b"data: ")
        await connection.send(b"SSH-2.0-OpenSSH\r\n")
        engine.later_gate.set()
        stream, _, refusal = (await connection.until_closed()).partition(b"HTTP/1.1 400")
    assert (b"[DONE]" in stream, stream.endswith(b"0\r\n\r\n"), b"malformed_http" in refusal) == (True, True, True)


async def test_a_body_that_turns_out_malformed_is_refused_once_its_answer_cannot_be_whole(
    start_router: Any, engine: Any
) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        await connection.send(CHUNKED, b"nonsense\r\n")
        assert status_and_code(await connection.until_closed()) == (400, "malformed_http")
    assert engine.requests == []


@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize(
    "junk",
    [
        b"SSH-2.0-OpenSSH\r\n",
        CHUNKED + b"nonsense\r\n",
        b"GET / HTTP/1.1\r\nbad\r\n\r\n",
        b"POST http://a:999999" + CHAT + b" HTTP/1.1\r\n\r\n",
        b"GET http://a:999999/v1/models HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_was_asked_before_nonsense_is_answered_first(
    junk: bytes, num_requests: int, start_router: Any, engine: Any
) -> None:
    router = await start_router(engine)
    engine.gate.clear()
    async with connected(router) as connection:
        await connection.send(request() * num_requests + junk)
        await engine.wait_for_requests(1)
        await connection.send(b"and more\r\n" * 10)
        engine.gate.set()
        for _ in range(num_requests):
            assert (await connection.answer())[0] == 200
        assert status_and_code(await connection.until_closed()) == (400, "malformed_http")
    assert len(engine.requests) == num_requests


async def test_a_client_that_leaves_after_nonsense_has_left(start_router: Any, engine: Any) -> None:
    router = await start_router(engine)
    engine.gate.clear()
    async with connected(router) as connection:
        await connection.send(request() + b"SSH-2.0-OpenSSH\r\n")
        await engine.wait_for_requests(1)
    await asyncio.wait_for(engine.aborted.wait(), 5)


async def test_nonsense_behind_a_request_is_not_taken_in_for_ever(start_router: Any, engine: Any) -> None:
    router = await start_router(engine)
    engine.gate.clear()
    async with connected(router) as connection:
        await connection.send(request() + b"SSH-2.0-OpenSSH\r\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await connection.send(*[b"x" * 2**16] * 1000)
        engine.gate.set()
        assert (await connection.answer())[0] == 200


async def test_trailers_are_counted_and_dropped(start_router: Any, engine: Any) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        chunk = b"%x\r\n%s\r\n0\r\nX-Forged: 1\r\n\r\n" % (len(BODY), BODY)
        await connection.send(CHUNKED + chunk)
        assert (await connection.answer())[0] == 200
    assert "x-forged" not in engine.headers[0]


async def test_where_all_connections_are_idle_a_newcomer_is_served(start_router: Any, engine: Any) -> None:
    router = await start_router(engine, max_connections=2)
    async with connected(router) as first, connected(router):
        assert await served(router)
        assert await first.until_closed() == b""


async def test_a_connection_between_two_requests_makes_way(start_router: Any, engine: Any) -> None:
    router = await start_router(engine, max_connections=1)
    async with connected(router) as first:
        await first.send(request())
        await first.answer()
        assert await served(router)
        assert await first.until_closed() == b""


async def test_a_client_that_left_during_its_answer_has_left_its_place(start_router: Any, engine: Any) -> None:
    router = await start_router(engine, max_connections=1)
    engine.gate.clear()
    async with connected(router) as first:
        await first.send(request())
        await engine.wait_for_requests(1)
    await asyncio.wait_for(engine.aborted.wait(), 5)
    assert await served(router)


@pytest.mark.parametrize("option", ["max_connections", "max_connections_per_peer"])
async def test_where_all_connections_are_busy_a_newcomer_is_refused(
    option: str, start_router: Any, engine: Any
) -> None:
    router = await start_router(engine, **{option: 1})
    engine.gate.clear()
    async with connected(router) as first:
        await first.send(request())
        await engine.wait_for_requests(1)
        async with connected(router) as second:
            assert status_and_code(await second.until_closed()) == (503, "too_many_connections")
        engine.gate.set()
        assert (await first.answer())[0] == 200


async def test_half_sent_bodies_do_not_keep_their_places(start_router: Any, engine: Any) -> None:
    router = await start_router(engine, max_connections=1, tuned={"clients": ClientTimes(body_seconds=0.1)})
    async with connected(router) as slow:
        await slow.send(request()[:-1])
        assert (await slow.answer())[0] == 408
        assert await served(router)
