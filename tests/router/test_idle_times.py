"""How long connections and answers may be idle, in virtual time: one timer looks at many, and none is cut off early."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from benchmarks.routing.virtual_time import VirtualTimeLoop
from uvicorn.server import ServerState

from kvasir_http.connections import ConnectionLimits, Connections
from kvasir_router.dialects.chat import Chat
from kvasir_router.relay.body import BodyBudget
from kvasir_router.relay.exchange import Exchange
from kvasir_router.relay.http_protocol import Forwarding, ForwardingHttpProtocol
from kvasir_router.relay.upstream_answer import IdleTimeouts

REQUEST = b"POST /chat HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"
KEEPALIVE_SECONDS = 75


@pytest.fixture
def loop() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    yield loop
    loop.close()


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """Is asked for nothing."""


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.num_answers = 0
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.num_answers += bytes(data).startswith(b"HTTP/1.1 200 ")

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    write_eof = abort = pause_reading = resume_reading = set_write_buffer_limits = lambda *_: None


def connected(
    loop: VirtualTimeLoop, answer_seconds: float = 0.0, connections: Connections | None = None
) -> tuple[ForwardingHttpProtocol, Transport]:
    async def answer(exchange: Exchange) -> None:
        await exchange.receive()
        await asyncio.sleep(answer_seconds)
        exchange.start(200, [(b"content-length", b"0")])
        exchange.end()

    protocol = ForwardingHttpProtocol(
        connections=connections or Connections(ConnectionLimits(9, 9)),
        forwarding=Forwarding({"/chat": Chat()}, answer, BodyBudget(100), 100),
        config=uvicorn.Config(nothing, lifespan="off", log_config=None),
        server_state=ServerState(),
        app_state={},
        _loop=loop,
    )
    transport = Transport()
    protocol.connection_made(transport)
    return protocol, transport


@pytest.mark.parametrize("method", [b"POST", b"GET"])
@pytest.mark.parametrize("before", [b"", REQUEST])
def test_a_drain_does_not_wait_for_a_head_that_was_refused(before: bytes, method: bytes, loop: VirtualTimeLoop) -> None:
    connections = Connections(ConnectionLimits(9, 9))
    protocol, transport = connected(loop, connections=connections)
    protocol.data_received(before + method + b" http://a:999999/chat HTTP/1.1\r\n\r\n")
    loop.run_until_complete(asyncio.sleep(10))
    assert (transport.num_answers, transport.is_closed) == (bool(before), True)
    protocol.connection_lost(None)
    loop.run_until_complete(connections.until_quiet(1))
    assert loop.time() < 100


def test_a_connection_is_kept_for_its_time_after_each_answer(loop: VirtualTimeLoop) -> None:
    protocol, transport = connected(loop)
    for number in range(3):
        protocol.data_received(REQUEST)
        loop.advance(KEEPALIVE_SECONDS - 1)
        assert (transport.num_answers, transport.is_closed) == (number + 1, False)
    loop.advance(2)
    assert transport.is_closed
    protocol.connection_lost(None)


def test_an_answer_that_takes_longer_than_a_connection_is_kept_is_waited_for(loop: VirtualTimeLoop) -> None:
    protocol, transport = connected(loop, answer_seconds=3 * KEEPALIVE_SECONDS)
    for number in range(2):
        protocol.data_received(REQUEST)
        loop.advance(3 * KEEPALIVE_SECONDS + 1)
        assert (transport.num_answers, transport.is_closed) == (number + 1, False)
    loop.advance(KEEPALIVE_SECONDS)
    assert transport.is_closed
    protocol.connection_lost(None)


class Answer:
    """Something comes of it now and then."""

    def __init__(self) -> None:
        self.has_heard = False
        self.since = 0.0
        self.timed_out_after: list[float] = []

    def idle_since(self, now: float) -> float:
        if self.has_heard:
            self.has_heard, self.since = False, now
        return self.since

    def time_out(self, seconds: float) -> None:
        self.timed_out_after.append(seconds)


def test_only_what_is_idle_for_the_whole_time_is_timed_out(loop: VirtualTimeLoop) -> None:
    timeouts = IdleTimeouts(8.0, loop)
    silent, lively = Answer(), Answer()
    for answer in (silent, lively):
        timeouts.watch(answer)
    for _ in range(2):
        loop.advance(3.9)
        lively.has_heard = True
    assert silent.timed_out_after == []
    loop.advance(1.3)
    assert set(silent.timed_out_after) == {8.0}
    loop.advance(6.0)
    assert lively.timed_out_after == []
    loop.advance(3.0)
    assert lively.timed_out_after
    timeouts.close()


def test_nothing_is_looked_at_once_nothing_is_watched(loop: VirtualTimeLoop) -> None:
    timeouts = IdleTimeouts(8.0, loop)
    answer = Answer()
    timeouts.watch(answer)
    timeouts.forget(answer)
    loop.advance(1.0)
    with pytest.raises(RuntimeError, match="no timer runs"):
        loop.run_forever()


def test_one_that_leaves_or_fails_as_it_is_timed_out_spares_none_of_the_others(loop: VirtualTimeLoop) -> None:
    timeouts = IdleTimeouts(8.0, loop)

    class Leaving(Answer):
        def time_out(self, seconds: float) -> None:
            super().time_out(seconds)
            timeouts.forget(self)
            timeouts.watch(Answer())

    class Failing(Answer):
        def time_out(self, seconds: float) -> None:
            super().time_out(seconds)
            raise RuntimeError("its connection is in no state for that")

    loop.set_exception_handler(lambda loop, context: None)
    answers = [kind() for kind in (Answer, Leaving, Failing) for _ in range(10)]
    for answer in answers:
        timeouts.watch(answer)
    loop.advance(8.0 + 20 * 1.0)
    assert [answer.timed_out_after for answer in answers] == [[8.0]] * 30
    timeouts.close()
