"""A client that leaves takes its requests in the engine core with it."""

import socket
import struct

import httpx
import pytest

LONG = {"prompt": "the quick brown fox", "max_tokens": 400, "ignore_eos": True}


def all_aborted(core) -> bool:
    """Each once; an abort that an earlier test left behind may still come in and is not counted."""
    received = sorted(request.request_id for request in core.received)
    aborted = sorted(abort.request_id for abort in core.aborted if abort.request_id in received and abort.index is None)
    return aborted == received != []


def test_leaving_a_stream_aborts_all_its_sequences(running) -> None:
    running.core.step_seconds = 0.01
    with running.http.stream("POST", "/v1/completions", json={**LONG, "n": 3, "stream": True}) as response:
        next(response.iter_lines())
    running.core.wait_until(all_aborted)
    assert [len(request.sequences) for request in running.core.received] == [3]


@pytest.mark.parametrize("stream", ["false", "true"])
def test_leaving_before_the_first_byte_aborts_too(running, stream: str) -> None:
    running.core.is_hanging = True
    body = b'{"prompt": "the quick", "stream": %s}' % stream.encode()
    url = httpx.URL(running.url)
    with socket.create_connection((url.host, url.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        running.core.wait_until(lambda core: core.received)
    running.core.wait_until(all_aborted)


def test_leaving_in_the_middle_of_the_body_harms_nobody(running) -> None:
    url = httpx.URL(running.url)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
    assert running.http.post("/v1/completions", json={"prompt": "the"}).status_code == 200


def test_no_request_is_counted_when_all_have_left(running) -> None:
    running.core.step_seconds = 0.01
    with running.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert running.http.get("/load").json()["server_load"] == 1
    running.core.wait_until(all_aborted)
    running.wait_idle()
    assert running.http.get("/drain").json()["in_flight_requests"] == 0


POSTED = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 23\r\n\r\n{"prompt": "the quick"}'
VERSION = b"GET /version HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("is_reset", [False, True], ids=["ended", "reset"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["at once", "later"])
def test_a_second_request_does_not_hide_that_the_client_of_the_first_leaves(
    running, is_cut: bool, is_reset: bool
) -> None:
    running.core.is_hanging = True
    url = httpx.URL(running.url)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(POSTED if is_cut else POSTED + VERSION)
        running.core.wait_until(lambda core: core.received)
        if is_cut:
            connection.sendall(VERSION)
            assert running.http.get("/version").status_code == 200, "by then it has been read"
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    running.core.wait_until(all_aborted)
