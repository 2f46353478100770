"""HTTP as its specifications have it, on either side of the router, with clients and engines that are not polite."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.anyio
CHAT = b"/v1/chat/completions"
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
STREAMED = BODY[:-1] + b',"stream":true}'


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, *parts: bytes) -> None:
        self._writer.write(b"".join(parts))

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """The next one, framed by its length, in chunks or by the connection's end."""
        async with asyncio.timeout(10):
            status, headers = await self.head()
            if b"content-length" in headers:
                return status, headers, await self._reader.readexactly(int(headers[b"content-length"]))
            if b"transfer-encoding" not in headers:
                return status, headers, await self._reader.read()
            body = b""
            while chunk := await self._chunk():
                body += chunk
            return status, headers, body

    async def head(self) -> tuple[int, dict[bytes, bytes]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        pairs = (line.partition(b": ")[::2] for line in lines[1:])
        return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}

    async def received(self, text: bytes) -> None:
        async with asyncio.timeout(10):
            await self._reader.readuntil(text)

    async def is_closed(self) -> bool:
        async with asyncio.timeout(10):
            return await self._reader.read(1) == b""

    async def _chunk(self) -> bytes:
        size = int(await self._reader.readline(), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    def leave(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def connected(router: Any) -> AsyncIterator[Connection]:
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


def request(body: bytes = BODY, *, headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"POST %b HTTP/%b\r\nHost: r\r\nContent-Length: %d\r\n%b\r\n"
    return head % (CHAT, version, len(body), headers) + body


class RawEngine:
    """An engine that answers probes as it must, and a request with the bytes that it was given."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.is_ready = True
        self.is_running = True
        self.url = ""

    async def start(self, stack: AsyncExitStack) -> "RawEngine":
        server = await stack.enter_async_context(await asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer_to(head, reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer_to(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        if not head.startswith(b"POST"):
            body = b'{"object":"list","data":[{"id":"tiny"}]}'
            return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        self.heads.append(head)
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
        await reader.readexactly(int(length.split()[1]))
        return self.answer


async def test_headers_that_connection_names_are_not_forwarded(engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    named = b"Connection: keep-alive, X-Mine,x-other\r\nX-Mine: 1\r\nX-Other: 2\r\nX-Kept: 3\r\nKeep-Alive: 5\r\n"
    async with connected(router) as connection:
        connection.send(request(headers=named))
        assert (await connection.answer())[0] == 200
    assert {"x-mine", "x-other", "keep-alive"} & engine.headers[0].keys() == set()
    assert engine.headers[0]["x-kept"] == "3"


async def test_headers_that_connection_names_are_not_relayed(start_router: Any, exit_stack: AsyncExitStack) -> None:
    answer = b"HTTP/1.1 200 OK\r\nConnection: X-Hop\r\nX-Hop: 1\r\nX-Kept: 2\r\nContent-Length: 2\r\n\r\n{}"
    router = await start_router(await RawEngine(answer).start(exit_stack))
    async with connected(router) as connection:
        connection.send(request())
        _, headers, _ = await connection.answer()
    assert (b"x-hop" in headers, headers[b"x-kept"]) == (False, b"2")


async def test_bytes_of_headers_pass_as_they_are_both_ways(start_router: Any, exit_stack: AsyncExitStack) -> None:
    answer = b"HTTP/1.1 200 OK\r\nX-Answer: \xc3\xa4\xff\r\nContent-Length: 2\r\n\r\n{}"
    engine = await RawEngine(answer).start(exit_stack)
    router = await start_router(engine)
    async with connected(router) as connection:
        connection.send(request(headers=b"X-Mine: \xc3\xa4\xff\r\nX-Request-Id: \xe4\r\n"))
        _, headers, _ = await connection.answer()
    assert (headers[b"x-answer"], headers[b"x-request-id"]) == (b"\xc3\xa4\xff", b"\xe4")
    assert b"\r\nx-mine: \xc3\xa4\xff\r\n" in engine.heads[0]
    assert b"\r\nx-request-id: \xe4\r\n" in engine.heads[0]


async def test_no_trailer_becomes_a_header(start_router: Any, exit_stack: AsyncExitStack) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Forged: 1\r\n\r\n"
    engine = await RawEngine(chunked).start(exit_stack)
    router = await start_router(engine)
    async with connected(router) as connection:
        for _ in range(2):
            head = b"POST %b HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT
            connection.send(head, b"%x\r\n%b\r\n0\r\nX-Forged: 1\r\n\r\n" % (len(BODY), BODY))
            status, headers, body = await connection.answer()
            assert (status, body, b"x-forged" in headers) == (200, b"{}", False)
    assert [b"x-forged" in head.lower() for head in engine.heads] == [False, False]


@pytest.mark.parametrize("folded", [b"X-A: b\r\n c\r\n", b"X-A: b\rc\r\n", b"X-A: b\nX-B: c\r\n", b"X-A: b\x00c\r\n"])
async def test_no_header_can_hold_another(folded: bytes, engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        connection.send(request(headers=folded))
        status, _, _ = await connection.answer()
    assert status == 400
    assert engine.requests == []


@pytest.mark.parametrize("coding", [b"gzip", b"Br", b"deflate, gzip", b"made-up"])
async def test_a_body_in_a_coding_is_refused_by_its_name(coding: bytes, engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        connection.send(request(headers=b"Content-Encoding: %b\r\n" % coding))
        status, headers, body = await connection.answer()
    assert (status, headers[b"accept-encoding"]) == (415, b"identity")
    assert coding in body
    assert b'"code":"unknown_content_encoding"' in body
    assert engine.requests == []


async def test_a_body_in_no_coding_is_taken(engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        connection.send(request(headers=b"Content-Encoding: Identity\r\n"))
        assert (await connection.answer())[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [(b"GET", CHAT, b"POST"), (b"OPTIONS", CHAT + b"/", b"POST"), (b"POST", b"/v1/models", b"GET, HEAD")],
)
async def test_whoever_asks_with_a_wrong_method_is_told_the_right_one(
    method: bytes, path: bytes, allowed: bytes, engine: Any, start_router: Any
) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        connection.send(b"%b %b HTTP/1.1\r\nHost: r\r\nContent-Length: 0\r\n\r\n" % (method, path))
        status, headers, body = await connection.answer()
    assert (status, headers[b"allow"], b'"code":"method_not_allowed"' in body) == (405, allowed, True)


@pytest.mark.parametrize("path", [CHAT, b"/v1/models"])
async def test_whoever_has_shown_no_key_is_told_how(path: bytes, engine: Any, start_router: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"sk-1": "blue"}')
    router = await start_router(engine, api_keys_file=keys)
    async with connected(router) as connection:
        method = b"POST" if path == CHAT else b"GET"
        connection.send(b"%b %b HTTP/1.1\r\nHost: r\r\nContent-Length: 0\r\n\r\n" % (method, path))
        status, headers, _ = await connection.answer()
    assert (status, headers[b"www-authenticate"]) == (401, b"Bearer")


# HTTP/1.0, and when connections end


@pytest.mark.parametrize("body", [BODY, STREAMED])
async def test_a_client_of_http_1_0_gets_no_chunks(body: bytes, engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        connection.send(request(body, version=b"1.0", headers=b"Connection: keep-alive\r\n"))
        status, headers, received = await connection.answer()
        assert await connection.is_closed()
    assert (status, headers[b"connection"], b"transfer-encoding" in headers) == (200, b"close", False)
    if body == STREAMED:
        assert received == engine.stream_bytes(5) + b"data: [DONE]\n\n"


async def test_a_client_that_wants_its_connection_closed_gets_it_closed(engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        connection.send(request(STREAMED, headers=b"Connection: close\r\n"))
        _, headers, body = await connection.answer()
        assert (headers[b"connection"], body.endswith(b"data: [DONE]\n\n")) == (b"close", True)
        assert await connection.is_closed()


async def test_an_answer_that_breaks_off_is_not_passed_off_as_whole(
    start_router: Any, exit_stack: AsyncExitStack
) -> None:
    chunked = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    engine = await RawEngine(chunked + b"1\r\n{\r\nx\r\n").start(exit_stack)
    router = await start_router(engine)
    async with connected(router) as connection:
        connection.send(request())
        with pytest.raises((asyncio.IncompleteReadError, ValueError)):
            await connection.answer()
        assert await connection.is_closed()


async def test_a_client_that_asks_whether_to_send_its_body_is_told(engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    whole = request(headers=b"Expect: 100-continue\r\n")
    async with connected(router) as connection:
        connection.send(whole[: -len(BODY)])
        assert (await connection.head())[0] == 100
        connection.send(BODY)
        assert (await connection.answer())[0] == 200
        connection.send(whole[: -len(BODY)].replace(b"%d" % len(BODY), b"999999999999"))
        assert (await connection.answer())[0] == 413
    assert "expect" not in engine.headers[0]


# Pipelining


async def test_pipelined_requests_are_answered_in_their_order(engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        models = b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n"
        connection.send(request(STREAMED), models, request(), b"GET /nope HTTP/1.1\r\n\r\n", request(b"{"), models)
        answers = [await connection.answer() for _ in range(6)]
    assert [status for status, _, _ in answers] == [200, 200, 200, 404, 400, 200]
    assert (answers[0][2].endswith(b"[DONE]\n\n"), b'"list"' in answers[1][2], b"choices" in answers[2][2]) == (
        True,
        True,
        True,
    )


async def test_one_request_is_handled_at_a_time(engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    engine.gate.clear()
    async with connected(router) as connection:
        connection.send(request(), request())
        await engine.wait_for_requests(1)
        await asyncio.sleep(0.1)
        assert len(engine.requests) == 1
        engine.gate.set()
        assert [(await connection.answer())[0] for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("second", [request(), b"GET /v1/models HTTP/1.1\r\n\r\n", b"GET /v1/mod"])
async def test_a_second_request_does_not_hide_that_the_client_of_the_first_has_left(
    second: bytes, engine: Any, start_router: Any, until: Any
) -> None:
    router = await start_router(engine)
    engine.gate.clear()
    async with connected(router) as connection:
        connection.send(request(), second)
        await engine.wait_for_requests(1)
        connection.leave()
        await asyncio.wait_for(engine.aborted.wait(), 5)
    await until(lambda: router.services.describe()[0]["num_in_flight"] == 0)
    assert len(engine.requests) == 1


async def test_what_is_sent_ahead_of_its_turn_is_bounded(engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    engine.gate.clear()
    num_bytes = 50_000_000
    async with connected(router) as connection:
        connection.send(request())
        await engine.wait_for_requests(1)
        connection.send(request(b"x" * num_bytes))
        await asyncio.sleep(0.3)
        lines = router.metrics.render().split(b"\n")
        held = next(line for line in lines if line.startswith(b"kvasir_router_held_body"))
        assert float(held.split()[1]) < num_bytes / 10
        engine.gate.set()
        assert [(await connection.answer())[0] for _ in range(2)] == [200, 400]


async def test_a_client_that_leaves_before_its_task_has_begun_leaves_nothing(
    engine: Any, start_router: Any, until: Any
) -> None:
    router = await start_router(engine)
    for _ in range(20):
        async with connected(router) as connection:
            connection.send(request(b"x" * 1000)[:-1])
            await asyncio.sleep(0)

    def is_empty() -> bool:
        text = router.metrics.render().decode()
        names = ("in_flight", "held_body_bytes", "connections")
        return all(f"kvasir_router_{name} 0.0" in text for name in names)

    await until(is_empty)


# Browsers


ORIGIN = b"Origin: https://chat.example\r\n"
PREFLIGHT = ORIGIN + b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n"


@pytest.mark.parametrize("allowed", ["https://chat.example", "*"])
async def test_pages_of_an_allowed_origin_may_use_the_router(
    allowed: str, start_router: Any, exit_stack: AsyncExitStack
) -> None:
    answer = b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: null\r\nContent-Length: 2\r\n\r\n{}"
    router = await start_router(
        await RawEngine(answer).start(exit_stack), cors_origin=("https://other.example", allowed)
    )
    shown = b"*" if allowed == "*" else b"https://chat.example"
    async with connected(router) as connection:
        connection.send(b"OPTIONS %b HTTP/1.1\r\nHost: r\r\n%b\r\n" % (CHAT, PREFLIGHT))
        status, headers, _ = await connection.answer()
        assert (status, headers[b"access-control-allow-origin"]) == (200, shown)
        assert b"POST" in headers[b"access-control-allow-methods"]
        assert b"authorization" in headers[b"access-control-allow-headers"]
        connection.send(request(headers=ORIGIN), request(b"{", headers=ORIGIN))
        connection.send(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n%b\r\n" % ORIGIN)
        for status in (200, 400, 200):
            seen, headers, _ = await connection.answer()
            assert (seen, headers[b"access-control-allow-origin"]) == (status, shown)
            assert b"x-request-id" in headers[b"access-control-expose-headers"]


async def test_pages_of_other_origins_may_not(engine: Any, start_router: Any) -> None:
    router = await start_router(engine, cors_origin=("https://other.example",))
    async with connected(router) as connection:
        connection.send(b"OPTIONS %b HTTP/1.1\r\nHost: r\r\n%b\r\n" % (CHAT, PREFLIGHT))
        status, headers, _ = await connection.answer()
        assert (status, b"access-control-allow-origin" in headers) == (400, False)
        connection.send(request(headers=ORIGIN))
        _, headers, _ = await connection.answer()
        assert (b"access-control-allow-origin" in headers, headers[b"vary"]) == (False, b"origin")


async def test_where_nothing_is_set_engines_decide(start_router: Any, exit_stack: AsyncExitStack) -> None:
    answer = b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nContent-Length: 2\r\n\r\n{}"
    router = await start_router(await RawEngine(answer).start(exit_stack))
    async with connected(router) as connection:
        connection.send(request(headers=ORIGIN))
        assert (await connection.answer())[1][b"access-control-allow-origin"] == b"*"


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("num_together", [0, 1, len(BODY), None], ids=["head", "a byte", "body", "all"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
async def test_a_body_behind_an_offer_of_http2_is_read(
    engine: Any, start_router: Any, num_together: int | None, is_chunked: bool
) -> None:
    """As Java's HTTP client sends every first request."""
    router = await start_router(engine)
    framing = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(BODY)
    head = b"POST %s HTTP/1.1\r\nhost: router\r\n%s%s\r\n\r\n" % (CHAT, H2C, framing)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if is_chunked else BODY
    following = b"GET /v1/models HTTP/1.1\r\nhost: router\r\n\r\n"
    sent = head + body + following
    cut = len(sent) if num_together is None else len(head) + num_together
    async with connected(router) as connection:
        connection.send(sent[:cut])
        await asyncio.sleep(0)  # so that what follows comes by itself
        connection.send(sent[cut:])
        assert (await connection.answer())[0] == 200
        status, _, models = await connection.answer()
    assert status == 200
    assert b'"tiny"' in models
    assert engine.bodies == [BODY]


async def test_a_request_without_body_that_offers_a_web_socket_is_answered(engine: Any, start_router: Any) -> None:
    router = await start_router(engine)
    async with connected(router) as connection:
        connection.send(b"GET /v1/models HTTP/1.1\r\nhost: router\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await connection.answer())[0] == 200
