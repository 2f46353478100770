"""What a client sends before it is answered, and how long it takes, has bounds; others are served meanwhile."""

import socket
import time
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from tests.runtime.server.conftest import running_server

from kvasir_runtime.config import ServerConfig
from kvasir_runtime.server.admission import ApiLimits

pytestmark = pytest.mark.alone


def connect(running) -> socket.socket:
    url = httpx.URL(running.url)
    return socket.create_connection((url.host, url.port), timeout=10)


def answer_to(connection: socket.socket, parts: Iterable[bytes] = ()) -> bytes:
    """What comes back until the server closes; sending ends when it does."""
    received = b""
    try:
        for part in parts:
            connection.sendall(part)
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionError:
        pass
    return received


def ask_version(connection: socket.socket) -> None:
    connection.sendall(b"GET /version HTTP/1.1\r\n\r\n")
    received = b""
    while not received.endswith(b'"}'):
        received += connection.recv(65536)
    assert b"200 OK" in received


def status_of(running, head: bytes) -> int:
    with connect(running) as connection:
        return int(
            answer_to(connection, [b"GET /version HTTP/1.1\r\nConnection: close\r\n" + head + b"\r\n"]).split()[1]
        )


def test_a_request_behind_a_long_body_on_one_connection_is_no_long_head(running) -> None:
    content = b"{" + b" " * 300_000 + b'"prompt": "a"}'
    one = b"POST /tokenize HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    with connect(running) as connection:
        received = answer_to(connection, [one, one[:20], one[20:], b"GET /version HTTP/1.0\r\n\r\n"])
    assert received.count(b" 200 OK") == 3


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["at once", "head first"])
def test_a_body_behind_an_offer_of_http2_is_read(running, is_chunked: bool, is_cut: bool) -> None:
    """As Java's HTTP client sends every first request; the next one is read as well."""
    content = b'{"prompt": "the quick"}'
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(content)
    head = b"POST /tokenize HTTP/1.1\r\n%s%s\r\n\r\n" % (H2C, framing)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content) if is_chunked else content
    last = b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n"
    with connect(running) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = answer_to(connection, [head, body + last] if is_cut else [head + body + last])
    assert received.count(b" 200 OK") == 2
    assert b'"tokens"' in received
    assert b'"version"' in received


@pytest.fixture(scope="module")
def hasty(model_folder, tmp_path_factory: pytest.TempPathFactory):
    """A server with no patience."""
    limits = ApiLimits(head_seconds=1.0, body_seconds=0.2)
    with running_server(model_folder, tmp_path_factory.mktemp("hasty"), limits=limits) as running:
        yield running


def test_a_body_that_does_not_come_is_not_waited_for(hasty) -> None:
    with connect(hasty) as connection:
        parts = [b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"]
        received = answer_to(connection, parts)
    assert b" 408 " in received
    assert b"body_timeout" in received


def test_who_is_refused_a_large_body_can_send_it_all_and_still_reads_why(running) -> None:
    """To close at once would reset the connection, and the answer with it."""
    num_bytes = ServerConfig().max_body_bytes + 2**20
    with connect(running) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % num_bytes)
        connection.sendall(b" " * num_bytes)
        assert b" 413 " in answer_to(connection)


def test_when_connections_are_full_the_longest_idle_makes_way(start_server) -> None:
    with start_server(config=ServerConfig(max_connections=3)) as running:
        running.http.close()
        idle = [connect(running) for _ in range(3)]
        for connection in reversed(idle):
            ask_version(connection)
        assert status_of(running, b"") == 200
        assert answer_to(idle[2]) == b""
        idle[0].sendall(b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in answer_to(idle[0])
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_peer"])
def test_when_all_connections_are_busy_the_next_is_sent_away(limit: str, start_server) -> None:
    with start_server(config=ServerConfig(**{limit: 2})) as running:
        running.http.close()
        busy = [connect(running) for _ in range(2)]
        for connection in busy:
            head = b"POST /tokenize HTTP/1.1\r\nContent-Length: 1\r\nConnection: close\r\nExpect: 100-continue\r\n\r\n"
            connection.sendall(head)
            assert b"100 Continue" in connection.recv(65536), "so its body is being waited for"
        with connect(running) as refused:
            received = answer_to(refused)
        assert b"503 Service Unavailable" in received
        assert b"retry-after: 1\r\n" in received
        assert b'"type":"service_unavailable_error"' in received
        for connection in busy:
            assert b"400 Bad Request" in answer_to(connection, [b"{"])
            connection.close()
        assert status_of(running, b"") == 200


def test_the_places_of_a_reader_that_stands_still_become_free(start_server: Any) -> None:
    """Its answer is far more than is buffered, and takes all places."""
    body = b'{"prompt": "the quick", "n": 8, "max_tokens": 400, "ignore_eos": true, "stream": true}'
    config = ServerConfig(max_sequences_in_flight=8)
    with start_server(config=config, limits=ApiLimits(reader_seconds=0.3)) as running, socket.socket() as stalled:
        running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        running.core.is_hanging = True
        url = httpx.URL(running.url)
        stalled.connect((url.host, url.port))
        stalled.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        running.core.wait_until(lambda core: core.received)
        assert status_of_next(running) == 503
        running.core.is_hanging = False
        deadline = time.monotonic() + 20
        while status_of_next(running) != 200:
            assert time.monotonic() < deadline, "the places never became free"
        running.wait_idle()


def status_of_next(running: Any) -> int:
    return running.http.post("/v1/completions", json={"prompt": "the", "max_tokens": 1}).status_code
