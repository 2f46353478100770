"""The pool of connections towards engines, before a server that says byte by byte what the test has written."""

import asyncio
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvasir_router.errors import (
    RequestTimeoutError,
    UpstreamBrokenError,
    UpstreamConnectError,
    UpstreamError,
    UpstreamLostError,
    UpstreamMalformedError,
)
from kvasir_router.relay.upstream_answer import MAX_HELD_BYTES, UpstreamAnswer
from kvasir_router.relay.upstream_connection import MAX_HEAD_BYTES, MAX_HEADERS, UpstreamConnection
from kvasir_router.relay.upstream_pool import UpstreamPool, UpstreamTimes

pytestmark = pytest.mark.anyio
TARGET = b"/v1/completions"
OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"content-length: 5\r\n\r\nhello"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"

CLOSE, RESET, STALL = "close", "reset", "stall"
Step = bytes | str | asyncio.Event


class ScriptedEngine:
    """`script[i][j]` is what the j-th request on the i-th connection is answered with, step by step."""

    def __init__(self) -> None:
        self.script: list[list[list[Step]]] = []
        self.requests: list[bytes] = []
        self.reads_bodies = True
        self.num_connections = 0
        self.num_lost = 0  # connections that the router has ended
        self.num_bytes_sent = 0
        self.url = ""
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, host: str, **options: Any) -> "ScriptedEngine":
        self._server = await asyncio.start_server(self._accept, host, 0, **options)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self

    async def stop(self) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = self.script[self.num_connections]
        self.num_connections += 1
        try:
            for answer in answers:
                await self._read_request(reader)
                for step in answer:
                    if not await self._take(step, writer):
                        return
            await reader.read()
            self.num_lost += 1
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_lost += 1
        finally:
            writer.close()

    async def _read_request(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not self.reads_bodies:
            return
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
        self.requests.append(head + await reader.readexactly(int(length.split()[1])))

    async def _take(self, step: Step, writer: asyncio.StreamWriter) -> bool:
        if isinstance(step, asyncio.Event):
            await step.wait()
        elif isinstance(step, bytes):
            writer.write(step)
            await writer.drain()
            self.num_bytes_sent += len(step)
            await asyncio.sleep(0.01)  # so that what follows is another read
        elif step == RESET:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        return step != CLOSE


@pytest.fixture
async def engine(exit_stack: AsyncExitStack) -> ScriptedEngine:
    return await started(exit_stack)


async def started(stack: AsyncExitStack, host: str = "127.0.0.1", **options: Any) -> ScriptedEngine:
    engine = await ScriptedEngine().start(host, **options)
    stack.push_async_callback(engine.stop)
    return engine


@pytest.fixture
async def pool() -> AsyncIterator[UpstreamPool]:
    async with UpstreamPool(connect_timeout_seconds=2.0, idle_seconds=5.0) as pool:
        yield pool


async def asked(pool: UpstreamPool, url: str) -> UpstreamAnswer:
    return await pool.post(url, TARGET, b"x-a: b\r\n", [b"{}"])


async def body_of(answer: UpstreamAnswer) -> bytes:
    pieces: list[bytes] = []
    try:
        await answer.relay(pieces.append)
    finally:
        answer.close()
    return b"".join(pieces)


async def ask(pool: UpstreamPool, url: str) -> tuple[int, bytes]:
    answer = await asked(pool, url)
    return answer.status, await body_of(answer)


async def test_a_request_is_what_it_was_told_to_be(engine: ScriptedEngine, pool: UpstreamPool) -> None:
    engine.script = [[[HELLO]]]
    answer = await pool.post(engine.url, b"/v1/completions?a=%20", b"x-a: \xff\r\nb: c\r\n", [b"{", b'"a":1', b"}"])
    await body_of(answer)
    host = engine.url.removeprefix("http://").encode()
    head = b"POST /v1/completions?a=%%20 HTTP/1.1\r\nhost: %b\r\ncontent-length: 7\r\nx-a: \xff\r\nb: c\r\n\r\n" % host
    assert engine.requests == [head + b'{"a":1}']


async def test_a_request_is_written_before_its_answer_is_waited_for(engine: ScriptedEngine, pool: UpstreamPool) -> None:
    """Where a connection is idle; else it is opened when the answer is."""
    engine.script = [[[HELLO], [HELLO]]]
    first = pool.send(engine.url, TARGET, b"", [b"1"])
    assert first.connection is None
    await body_of(await pool.answer(first))
    second = pool.send(engine.url, TARGET, b"", [b"2"])
    assert second.connection is not None
    while len(engine.requests) < 2:  # noqa: ASYNC110  (the engine has no event for it)
        await asyncio.sleep(0)
    assert await body_of(await pool.answer(second)) == b"hello"
    assert engine.num_connections == 1


async def test_a_request_is_held_until_its_answer_has_begun(engine: ScriptedEngine, pool: UpstreamPool) -> None:
    engine.script = [[[HELLO], [CLOSE]], [[HELLO]]]
    await ask(pool, engine.url)
    sending = pool.send(engine.url, TARGET, b"", [b"body"])
    assert b"".join(sending.request).endswith(b"body")
    answer = await pool.answer(sending)  # of the second connection: it was written again
    assert engine.num_connections == 2
    assert not sending.request
    assert await body_of(answer) == b"hello"


async def test_the_first_byte_is_told_behind_what_is_there_already(engine: ScriptedEngine, pool: UpstreamPool) -> None:
    engine.script = [[[HELLO]]]
    events: list[object] = []
    answer = await asked(pool, engine.url)
    await answer.relay(events.append, events.append)
    answer.close()
    assert events == [b"hello", 200]


async def test_an_answers_headers_keep_their_order_and_bytes(engine: ScriptedEngine, pool: UpstreamPool) -> None:
    engine.script = [[[OK + b"X-A: \xe4\xff\r\nSet-Cookie: 1\r\nSet-Cookie: 2\r\nEmpty:\r\nContent-Length: 0\r\n\r\n"]]]
    answer = await asked(pool, engine.url)
    assert answer.headers == [
        (b"x-a", b"\xe4\xff"),
        (b"set-cookie", b"1"),
        (b"set-cookie", b"2"),
        (b"empty", b""),
        (b"content-length", b"0"),
    ]


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        ([HELLO], 200, b"hello"),
        ([HELLO[:-3], HELLO[-3:]], 200, b"hello"),
        ([OK + b"content-length: 0\r\n\r\n"], 200, b""),
        ([CHUNKED + b"5\r\nhello\r\n", b"1\r\n!\r\n0\r\n\r\n"], 200, b"hello!"),
        ([CHUNKED + b"0\r\n\r\n"], 200, b""),
        ([CHUNKED + b"5;a=b\r\nhello\r\n0\r\nX-Trailer: 1\r\n\r\n"], 200, b"hello"),
        ([OK + b"Transfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"], 200, b"hello"),
        ([OK + b"\r\nhel", b"lo", CLOSE], 200, b"hello"),
        ([OK + b"\r\n", CLOSE], 200, b""),
        ([b"HTTP/1.0 200 OK\r\n\r\nhello", CLOSE], 200, b"hello"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], 204, b""),
        ([b"HTTP/1.1 100 Continue\r\nX-I: 1\r\n\r\n" + HELLO], 200, b"hello"),
        ([b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n", b"HTTP/1.1 102 \r\n\r\n", HELLO], 200, b"hello"),
        ([b"HTTP/1.1 503\r\ncontent-length: 2\r\n\r\nno"], 503, b"no"),
        ([bytes([byte]) for byte in HELLO], 200, b"hello"),
        ([bytes([byte]) for byte in CHUNKED + b"5\r\nhello\r\n0\r\nA: b\r\n\r\n"], 200, b"hello"),
    ],
)
async def test_an_answer_may_be_framed_in_every_way(
    answer: list[Step], status: int, body: bytes, engine: ScriptedEngine, pool: UpstreamPool
) -> None:
    engine.script = [[answer]]
    taken = await asked(pool, engine.url)
    assert (taken.status, await body_of(taken)) == (status, body)
    assert not {b"x-trailer", b"a", b"x-i", b"link"} & {name for name, _ in taken.headers}


async def test_what_comes_in_one_read_goes_out_in_one_piece(engine: ScriptedEngine, pool: UpstreamPool) -> None:
    engine.script = [[[CHUNKED, b"1\r\na\r\n1\r\nb\r\n", b"1\r\nc\r\n0\r\n\r\n"]]]
    pieces: list[bytes] = []
    await (await asked(pool, engine.url)).relay(pieces.append)
    assert pieces == [b"ab", b"c"]


# Connections are kept


async def test_a_connection_is_used_again(engine: ScriptedEngine, pool: UpstreamPool) -> None:
    engine.script = [[[HELLO], [CHUNKED + b"2\r\nho\r\n0\r\n\r\n"], [HELLO]]]
    assert [await ask(pool, engine.url) for _ in range(3)] == [(200, b"hello"), (200, b"ho"), (200, b"hello")]
    assert engine.num_connections == 1


async def test_two_at_a_time_have_two_connections(engine: ScriptedEngine, pool: UpstreamPool) -> None:
    engine.script = [[[HELLO]], [[HELLO]]]
    assert await asyncio.gather(ask(pool, engine.url), ask(pool, engine.url)) == [(200, b"hello")] * 2
    assert engine.num_connections == 2


@pytest.mark.parametrize(
    "first",
    [
        [OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello"],
        [b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello"],
        [OK + b"\r\nhello", CLOSE],
        [HELLO + HELLO],
        [HELLO + b"nonsense"],
    ],
)
async def test_a_connection_that_cannot_be_trusted_with_another_answer_is_closed(
    first: list[Step], engine: ScriptedEngine, pool: UpstreamPool, until: Any
) -> None:
    engine.script = [[first], [[OK + b"content-length: 2\r\n\r\nho"]]]
    assert await ask(pool, engine.url) == (200, b"hello")
    if first[-1] != CLOSE:
        await until(lambda: engine.num_lost == 1)
    assert await ask(pool, engine.url) == (200, b"ho")


async def test_what_nobody_has_asked_for_ends_an_idle_connection(
    engine: ScriptedEngine, pool: UpstreamPool, until: Any
) -> None:
    engine.script = [[[HELLO, b"HTTP/1.1 408 Timeout\r\ncontent-length: 0\r\n\r\n"]], [[HELLO]]]
    assert await ask(pool, engine.url) == (200, b"hello")
    await until(lambda: engine.num_lost == 1)
    assert await ask(pool, engine.url) == (200, b"hello")


async def test_an_engine_that_answers_before_it_has_read_gets_no_other_request_there(
    engine: ScriptedEngine, pool: UpstreamPool
) -> None:
    engine.script, engine.reads_bodies = [[[HELLO, asyncio.Event()]]] * 2, False
    for number in (1, 2):
        answer = await pool.post(engine.url, TARGET, b"", [b"x" * 50_000_000])
        assert (answer.status, await body_of(answer), engine.num_connections) == (200, b"hello", number)


def pool_of(**times: float) -> UpstreamPool:
    return UpstreamPool(connect_timeout_seconds=2.0, idle_seconds=5.0, times=UpstreamTimes(**times))


async def test_an_idle_connection_is_closed_before_the_engine_does(engine: ScriptedEngine, until: Any) -> None:
    engine.script = [[[HELLO]], [[HELLO]]]
    async with pool_of(keepalive=0.05, sweep=0.05) as pool:
        for number in (1, 2):
            assert await ask(pool, engine.url) == (200, b"hello")
            await until(lambda number=number: engine.num_lost == number)


async def test_a_connection_idle_for_too_long_is_not_used_although_it_is_there(engine: ScriptedEngine) -> None:
    engine.script = [[[HELLO]] * 1000] * 1000
    async with pool_of(keepalive=0.05, sweep=60.0) as pool, asyncio.timeout(10):
        while not len(pool):
            await ask(pool, engine.url)
            await asyncio.sleep(0.03)
            await ask(pool, engine.url)  # so that the sweep finds the connection too young, and comes no more
            await asyncio.sleep(0.06)
        assert pool.send(engine.url, TARGET, b"", [b"{}"]).connection is None


async def test_a_connection_that_the_engine_has_closed_is_not_used(
    engine: ScriptedEngine, pool: UpstreamPool, until: Any
) -> None:
    engine.script = [[[HELLO, CLOSE]], [[HELLO]]]
    await ask(pool, engine.url)
    await until(lambda: not len(pool))
    assert await ask(pool, engine.url) == (200, b"hello")
    assert len(engine.requests) == 2


@pytest.mark.parametrize("end", [CLOSE, RESET])
async def test_a_request_that_meets_the_end_of_an_idle_connection_is_written_to_a_fresh_one(
    end: str, engine: ScriptedEngine, pool: UpstreamPool
) -> None:
    engine.script = [[[HELLO], [end]], [[HELLO]]]
    assert [await ask(pool, engine.url) for _ in range(2)] == [(200, b"hello")] * 2
    assert len(engine.requests) == 3


@pytest.mark.parametrize("answer", [[OK[:10], CLOSE], [CLOSE]])
async def test_it_is_not_where_something_of_an_answer_came_or_the_connection_is_fresh(
    answer: list[Step], engine: ScriptedEngine, pool: UpstreamPool
) -> None:
    is_fresh = answer == [CLOSE]
    engine.script = [[answer], []] if is_fresh else [[[HELLO], answer], []]
    if not is_fresh:
        await ask(pool, engine.url)
    with pytest.raises(UpstreamLostError):
        await ask(pool, engine.url)
    assert engine.num_connections == 1


async def test_nor_where_the_engine_has_had_time_to_work_on_it(engine: ScriptedEngine) -> None:
    pause = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, pause.set)
    engine.script = [[[HELLO], [pause, CLOSE]], []]
    async with pool_of(close_race=0.001) as pool:
        await ask(pool, engine.url)
        with pytest.raises(UpstreamLostError):
            await ask(pool, engine.url)
    assert engine.num_connections == 1


# Answers that end too early, or are none


@pytest.mark.parametrize("end", [CLOSE, RESET])
@pytest.mark.parametrize(
    "beginning",
    [b"", b"HTTP/1.", OK, OK + b"content-le", OK + b"content-length: 5\r\n\r\n", CHUNKED, CHUNKED + b"5\r\n"],
)
async def test_a_connection_that_ends_before_the_body_has_lost_the_answer(
    beginning: bytes, end: str, engine: ScriptedEngine, pool: UpstreamPool
) -> None:
    engine.script = [[[beginning, end]]]
    with pytest.raises(UpstreamLostError) as raised:
        await ask(pool, engine.url)
    assert (raised.value.reason, engine.url in str(raised.value)) == ("lost", True)


@pytest.mark.parametrize("end", [CLOSE, RESET])
@pytest.mark.parametrize(
    "rest", [HELLO[:-1], CHUNKED + b"5\r\nhel", CHUNKED + b"5\r\nhello\r\n", CHUNKED + b"5\r\nhello\r\n0\r\n"]
)
async def test_a_connection_that_ends_within_the_body_has_broken_the_answer(
    rest: bytes, end: str, engine: ScriptedEngine, pool: UpstreamPool
) -> None:
    engine.script = [[[rest, end]]]
    answer, pieces = await asked(pool, engine.url), list[bytes]()
    with pytest.raises(UpstreamBrokenError) as raised:
        await answer.relay(pieces.append)
    assert raised.value.reason == "broken"
    assert b"hello".startswith(b"".join(pieces))
    assert pieces


async def test_an_answer_to_its_connections_end_is_broken_by_a_reset(
    engine: ScriptedEngine, pool: UpstreamPool
) -> None:
    engine.script = [[[OK + b"\r\nhello", RESET]]]
    answer = await asked(pool, engine.url)
    with pytest.raises(UpstreamBrokenError):
        await answer.relay(lambda _: None)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 099 Low\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"a b: c\r\n\r\n",
        OK + b"a: b\rc\r\n\r\n",
        OK + b"a: b\x00c\r\n\r\n",
        OK + b"content-length: -1\r\n\r\n",
        OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
        OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"transfer-encoding: gzip\r\n\r\n",
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n",
        CHUNKED + b"x\r\n",
        CHUNKED + b"-5\r\nhello\r\n",
        OK + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        OK + b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_HEAD_BYTES // 25 + 1),
    ],
)
async def test_what_is_no_answer_is_told_so_by_name(answer: bytes, engine: ScriptedEngine, pool: UpstreamPool) -> None:
    engine.script = [[[answer, STALL, asyncio.Event()]]]
    with pytest.raises(UpstreamMalformedError, match=r"no HTTP/1\.1 answer") as raised:
        await ask(pool, engine.url)
    assert (raised.value.reason, engine.url in str(raised.value)) == ("malformed", True)


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 ", OK, OK + b"a: ", CHUNKED + b"5;", CHUNKED + b"0\r\na: "])
async def test_nothing_without_end_is_taken_in(beginning: bytes, engine: ScriptedEngine, pool: UpstreamPool) -> None:
    engine.script = [[[beginning, *[b"a" * 4096] * 200]]]
    with pytest.raises(UpstreamMalformedError):
        await ask(pool, engine.url)


async def test_a_head_of_the_greatest_size_is_taken(engine: ScriptedEngine, pool: UpstreamPool) -> None:
    name, length = b"a", b"content-length: 0\r\n"
    value = b"b" * (MAX_HEAD_BYTES - len(name) - len(length.replace(b": ", b"").strip()))
    for filling in (b"a: b\r\n" * (MAX_HEADERS - 1), b"%b: %b\r\n" % (name, value)):
        engine.script = [*engine.script, [[OK + length + filling + b"\r\n", CLOSE]]]
        assert await ask(pool, engine.url) == (200, b"")


@pytest.mark.parametrize("rest", [b"x\r\n", b"5\r\nhello!!", b"5;" + b"a" * (MAX_HEAD_BYTES + 1)])
async def test_what_goes_wrong_within_a_body_has_broken_it(
    rest: bytes, engine: ScriptedEngine, pool: UpstreamPool, until: Any
) -> None:
    engine.script = [[[CHUNKED + b"1\r\na\r\n", rest]]]
    answer, pieces = await asked(pool, engine.url), list[bytes]()
    with pytest.raises(UpstreamBrokenError) as raised:
        await answer.relay(pieces.append)
    assert (raised.value.reason, pieces[0]) == ("malformed", b"a")
    await until(lambda: engine.num_lost == 1)


# Giving up, waiting and holding back


@pytest.mark.parametrize("beginning", [b"", OK, CHUNKED + b"1\r\na\r\n"])
async def test_who_gives_up_ends_the_connection(
    beginning: bytes, engine: ScriptedEngine, pool: UpstreamPool, until: Any
) -> None:
    engine.script = [[[beginning, asyncio.Event()]]]
    asking = asyncio.create_task(ask(pool, engine.url))
    await until(lambda: engine.num_bytes_sent == len(beginning) and bool(engine.requests))
    asking.cancel()
    await until(lambda: not len(pool))


async def test_an_answer_that_is_not_taken_to_its_end_is_aborted_at_the_engine(
    engine: ScriptedEngine, pool: UpstreamPool, until: Any
) -> None:
    engine.script = [[[CHUNKED + b"1\r\na\r\n", *[b"1\r\na\r\n"] * 10_000]]]
    (await asked(pool, engine.url)).close()
    await until(lambda: engine.num_lost == 1)


@pytest.mark.parametrize("beginning", [b"", CHUNKED, CHUNKED + b"1\r\na\r\n"])
async def test_an_engine_that_says_nothing_for_too_long_is_not_waited_for(
    beginning: bytes, engine: ScriptedEngine, until: Any
) -> None:
    engine.script = [[[beginning, asyncio.Event()]]]
    async with UpstreamPool(2.0, idle_seconds=0.1) as pool:
        with pytest.raises(RequestTimeoutError, match=r"has sent nothing for 0.1 s"):
            await ask(pool, engine.url)
        await until(lambda: not len(pool))


async def test_a_stream_may_be_as_long_as_it_likes(engine: ScriptedEngine) -> None:
    engine.script = [[[CHUNKED, *[b"1\r\na\r\n"] * 40, b"0\r\n\r\n"]]]
    async with UpstreamPool(2.0, idle_seconds=0.2) as pool:  # the stream takes 0.4 s
        assert await ask(pool, engine.url) == (200, b"a" * 40)


async def test_the_time_in_which_its_reader_holds_it_back_is_not_the_engines(engine: ScriptedEngine) -> None:
    engine.script = [[[CHUNKED + b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"]]]
    async with UpstreamPool(2.0, idle_seconds=0.1) as pool:
        answer, pieces = await asked(pool, engine.url), list[bytes]()
        answer.pause()
        relay = asyncio.create_task(answer.relay(pieces.append))
        await asyncio.sleep(0.3)
        assert not relay.done()
        answer.resume()
        await relay
        assert b"".join(pieces) == b"ab"


async def test_a_reader_that_has_enough_holds_the_engine_back(
    engine: ScriptedEngine, pool: UpstreamPool, until: Any
) -> None:
    body = b"x" * 100_000_000
    engine.script = [[[OK + b"content-length: %d\r\n\r\n" % len(body), body]]]
    answer, num_bytes = await asked(pool, engine.url), 0

    def write(piece: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(piece)
        if num_bytes - len(piece) < 2**20 <= num_bytes:
            answer.pause()

    relay = asyncio.create_task(answer.relay(write))
    await until(lambda: num_bytes >= 2**20)
    seen = num_bytes
    await asyncio.sleep(0.2)
    assert (num_bytes, engine.num_bytes_sent < len(body)) == (seen, True)
    answer.resume()
    await relay
    assert num_bytes == len(body)


async def test_of_a_body_that_nobody_takes_little_is_held(
    engine: ScriptedEngine, pool: UpstreamPool, until: Any
) -> None:
    body = b"x" * 50_000_000
    engine.script = [[[OK + b"content-length: %d\r\n\r\n" % len(body), body]]]
    answer, pieces = await asked(pool, engine.url), list[bytes]()
    await asyncio.sleep(0.2)
    relaying = asyncio.create_task(answer.relay(pieces.append))
    await until(lambda: pieces)
    assert len(pieces[0]) < MAX_HELD_BYTES + 2**19  # a read more
    await relaying
    assert b"".join(pieces) == body


def test_a_vanished_node_is_found_by_probes_of_the_kernel() -> None:
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    with socket.socket() as probed:
        connection = UpstreamConnection("http://engine", lambda _: None, lambda _: None)
        connection.connection_made(asyncio.Transport({"socket": probed}))
        assert probed.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert [probed.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [10, 5, 3, 25_000]


async def test_at_the_pools_end_no_connection_is_left(engine: ScriptedEngine, until: Any) -> None:
    engine.script = [[[CHUNKED + b"1\r\na\r\n", asyncio.Event()]], [[HELLO]]]
    async with UpstreamPool(2.0, 5.0) as pool:
        busy, idle = await asked(pool, engine.url), await asked(pool, engine.url)
        await body_of(idle)
        relay = asyncio.create_task(busy.relay(lambda _: None))
    assert not len(pool)
    relay.cancel()
    busy.close()


# Where engines are


async def test_names_and_ipv6_addresses_are_connected_to(exit_stack: AsyncExitStack, pool: UpstreamPool) -> None:
    for host, name in (("::1", "[::1]"), ("127.0.0.1", "localhost")):
        engine = await started(exit_stack, host)
        engine.script = [[[HELLO]]]
        port = engine.url.rpartition(":")[2]
        assert await ask(pool, f"http://{name}:{port}") == (200, b"hello")
        assert f"host: {name}:{port}\r\n".encode() in engine.requests[0]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:80", "http://a:b", "ftp://a"])
async def test_where_nobody_listens_the_request_was_seen_by_nobody(url: str, pool: UpstreamPool) -> None:
    with pytest.raises(UpstreamConnectError) as raised:
        await asked(pool, url)
    assert (raised.value.reason, url in str(raised.value)) == ("connect", True)


async def test_a_connection_that_does_not_come_about_in_time_is_none() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        async with UpstreamPool(0.2, 5.0) as pool:
            with pytest.raises(UpstreamConnectError, match=r"not within 0.2 s"):
                await asked(pool, f"http://127.0.0.1:{address[1]}")
        for filler in fillers:
            filler.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "engine.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    options = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(path), "-out", str(path) + ".crt"]
    subprocess.run([*command.split(), *options], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(str(path) + ".crt").read_bytes())
    return path


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_an_engine_behind_tls_shows_a_certificate_that_is_trusted(
    is_trusted: bool,
    certificate: Path,
    exit_stack: AsyncExitStack,
    pool: UpstreamPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    engine = await started(exit_stack, ssl=context)
    engine.script = [[[HELLO], [HELLO]]] * 2
    url = engine.url.replace("http:", "https:")
    if is_trusted:
        assert [await ask(pool, url) for _ in range(2)] == [(200, b"hello")] * 2
        assert engine.num_connections == 1
    else:
        with pytest.raises(UpstreamConnectError, match="certificate"):
            await asked(pool, url)


def test_every_failure_of_an_attempt_can_be_told_from_one_of_the_request() -> None:
    for kind in (UpstreamConnectError, UpstreamLostError, UpstreamMalformedError, UpstreamBrokenError):
        assert issubclass(kind, UpstreamError)
