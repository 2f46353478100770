"""All bodies together have a bound, from their first byte until what is made of them is answered."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.runtime.server.test_http_bounds import answer_to, connect

from kvasir_runtime.config import ServerConfig
from kvasir_runtime.errors import ServerUnavailableError
from kvasir_runtime.server.admission import ApiLimits, BodyBudget

COMPLETION = b'{"prompt": "the", "max_tokens": 1}'


def test_what_would_be_too_much_is_not_taken_and_what_is_given_back_can_be_taken_again() -> None:
    budget = BodyBudget(10)
    budget.take(8)
    with pytest.raises(ServerUnavailableError, match="holds 8 bytes of requests and takes no more than 10"):
        budget.take(3)
    budget.take(2)
    budget.give_back(8)
    budget.take(8)
    assert budget.num_bytes == 10


@pytest.fixture
def small(start_server: Any) -> Iterator[Any]:
    """A server that holds two of its largest bodies at once."""
    with start_server(config=ServerConfig(max_body_bytes=1000), limits=ApiLimits(held_bytes=1)) as running:
        yield running


def begin(running: Any, num_bytes: int) -> socket.socket:
    """A body of a thousand bytes that stops there."""
    connection = connect(running)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n" + b" " * num_bytes)
    return connection


def wait_until_asking_gives(running: Any, status: int) -> bytes:
    """A body is taken a moment after it was sent, and given back a moment after its client has left."""
    request = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
    deadline = time.monotonic() + 20
    while True:
        with connect(running) as connection:
            received = answer_to(connection, [request % (len(COMPLETION), COMPLETION)])
        if b" %d " % status in received[:20]:
            return received
        assert time.monotonic() < deadline, received


def test_unfinished_bodies_leave_no_room_for_another_until_they_leave(small: Any) -> None:
    unfinished = [begin(small, 990) for _ in range(2)]
    received = wait_until_asking_gives(small, 503)
    assert b"retry-after: 1\r\n" in received
    assert b"holds 1980 bytes" in received
    for connection in unfinished:
        connection.close()
    wait_until_asking_gives(small, 200)


def test_a_body_counts_until_it_is_answered(small: Any) -> None:
    """Not until it is whole: what is made of it is held as long."""
    small.core.is_hanging = True
    answered = [begin(small, 1000 - len(COMPLETION)) for _ in range(2)]
    for connection in answered:
        connection.sendall(COMPLETION)
    wait_until_asking_gives(small, 503)
    small.core.is_hanging = False
    for connection in answered:
        assert b" 200 OK" in connection.recv(65536)
        connection.close()
    wait_until_asking_gives(small, 200)


def test_a_body_that_was_refused_holds_nothing(small: Any) -> None:
    unfinished = [begin(small, 900) for _ in range(2)]
    with begin(small, 500) as refused:
        assert b" 503 " in refused.recv(65536)
        refused.sendall(b" " * 500)
        received = answer_to(refused, [b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n"])
        assert b" 200 OK" in received, "the connection goes on"
    with begin(small, 500) as refused:
        assert b" 503 " in refused.recv(65536), "nothing was given back that had not been taken"
    assert b" 200 OK" in wait_until_asking_gives(small, 200), "the 34 bytes of this one have room"
    for connection in unfinished:
        connection.close()
