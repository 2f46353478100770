"""Clients that break off, and bytes that are no HTTP: nothing is left behind, nothing hangs, and nothing is a 500."""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import struct
from typing import Any

import pytest

pytestmark = pytest.mark.anyio
NUM_AT_ONCE = 64


def request_bytes(*, stream: bool, length: int = 40, path: str = "/v1/chat/completions", model: str = "tiny") -> bytes:
    content = "x" * length
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}], "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def chunked(body: bytes, size: int) -> bytes:
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ntransfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    )


class Client:
    """A connection that can be reset in the middle of anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, router: Any) -> "Client":
        host, port = router.url.removeprefix("http://").rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port)))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """The peer sees a reset, not an end."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def answer(self, patience_seconds: float) -> bytes:
        """Until the router closes; one that waits for the rest of a request may keep silent."""
        received = b""
        try:
            async with asyncio.timeout(patience_seconds):
                while chunk := await self.reader.read(65536):
                    received += chunk
        except (ConnectionError, TimeoutError):
            pass
        return received


class Traces:
    """What a router has at work: each figure is to be as before when all is over."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self._num_tasks = len(asyncio.all_tasks())
        self._num_descriptors = self._descriptors()
        self._num_connections = _series(self._text(), "connections")  # of clients that are no part of this

    def left_behind(self) -> dict[str, float]:
        text = self._text()
        figures = {name: _series(text, name) for name in ("in_flight", "held_body_bytes", "queue_depth")}
        figures["connections"] = max(_series(text, "connections") - self._num_connections, 0)
        for service in self._router.services:
            figures["held"] = len(service.admission.held_demand())
            for endpoint in service.registry:
                figures["tickets"] = figures.get("tickets", 0) + service.ledger.has_in_flight(endpoint.url)
                figures["load"] = figures.get("load", 0) + endpoint.load.num_in_flight + endpoint.load.resident_tokens
                figures["prefill"] = figures.get("prefill", 0) + endpoint.load.prefill_tokens
        figures["tasks"] = max(len(asyncio.all_tasks()) - self._num_tasks - _SPARE_TASKS, 0)
        figures["descriptors"] = max(self._descriptors() - self._num_descriptors - _SPARE_DESCRIPTORS, 0)
        return {name: value for name, value in figures.items() if value}

    def num_internal_errors(self) -> float:
        return sum(
            float(value) for value in re.findall(r'kvasir_router_requests_total\{code="500"[^}]*\} (\S+)', self._text())
        )

    def _text(self) -> str:
        return str(self._router.metrics.render().decode())

    @staticmethod
    def _descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))


def _series(text: str, name: str) -> float:
    found = re.search(rf"^kvasir_router_{name} (\S+)", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


# Probes come and go, and a connection to each engine may be pooled or on its way out.
_SPARE_TASKS = 8
_SPARE_DESCRIPTORS = 12


async def break_off(router: Any, chance: random.Random) -> None:
    """One client that goes at a random moment: while it sends, while it waits, or while it reads."""
    data = request_bytes(stream=chance.random() < 0.7, length=chance.choice((5, 500, 50_000)))
    if chance.random() < 0.2:
        data = chunked(data.partition(b"\r\n\r\n")[2], chance.choice((1, 7)) if len(data) < 2000 else 1000)
    client = await Client.open(router)
    try:
        sent = chance.choice((0, chance.randrange(200), chance.randrange(len(data)), len(data), len(data)))
        await client.send(data[:sent])
        match chance.randrange(4):
            case 0:
                await asyncio.sleep(0)
            case 1:
                await asyncio.sleep(chance.random() * 0.02)
            case 2 if sent == len(data):
                async with asyncio.timeout(20):
                    await client.reader.read(1)
            case 3 if sent == len(data):
                async with asyncio.timeout(20):
                    await client.reader.read(chance.randrange(1, 2000))
    except ConnectionError:
        pass
    finally:
        client.reset() if chance.random() < 0.5 else client.writer.close()


async def served(router: Any, client: Any) -> bool:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with asyncio.timeout(10), client.post(router.url + "/v1/chat/completions", json=body) as response:
        await response.read()
        return response.status == 200


@pytest.mark.parametrize("num_aborts", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_clients_that_break_off_at_any_moment_leave_nothing_behind(
    num_aborts: int, engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, max_in_flight=8, max_queue_size=20)  # so that many wait, and some are refused
    for engine in engines:
        engine.token_seconds, engine.num_tokens = 0.001, 5
    assert await served(router, client)
    traces, chance = Traces(router), random.Random(10)
    remaining = iter(range(num_aborts))

    async def keep_breaking_off() -> None:
        for _ in remaining:
            await break_off(router, chance)

    await asyncio.gather(*(keep_breaking_off() for _ in range(NUM_AT_ONCE)))
    for engine in engines:
        engine.requests.clear()
    await _clean(traces)
    assert traces.num_internal_errors() == 0
    assert await served(router, client)


async def _clean(traces: Traces) -> None:
    """A busy machine may have connections to accept whose clients have left long ago."""
    try:
        async with asyncio.timeout(60):
            while traces.left_behind():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"left behind: {traces.left_behind()}") from None


FRAMINGS = {
    "no size": b"\r\nx\r\n0\r\n\r\n",
    "size is no number": b"zz\r\nx\r\n0\r\n\r\n",
    "negative size": b"-1\r\nx\r\n0\r\n\r\n",
    "size with a prefix": b"0x1\r\nx\r\n0\r\n\r\n",
    "size beyond 64 bits": b"f" * 17 + b"\r\nx\r\n0\r\n\r\n",
    "size of zeros without end": b"0" * 100_000,
    "more than the size": b"1\r\nxyz\r\n0\r\n\r\n",
    "no line end after the data": b"1\r\nx0\r\n\r\n",
    "bare line feeds": b"1\nx\n0\n\n",
    "extension without end": b"1;" + b"a" * 1_000_000,
    "trailers without end": b"0\r\n" + b"a: b\r\n" * 100_000,
    "a chunk that never ends": b"ffffffff\r\n" + b"x" * 1000,
}


@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS.keys())
async def test_malformed_chunks_are_refused_or_cut_off(
    framing: bytes, engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine)
    traces = Traces(router)
    attacker = await Client.open(router)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ntransfer-encoding: chunked\r\n\r\n"
    with contextlib.suppress(ConnectionError):  # refused before the end
        await attacker.send(head + framing)
    answer = await attacker.answer(patience_seconds=1.0)
    assert re.match(rb"HTTP/1.1 4\d\d ", answer) or not answer
    attacker.writer.close()
    assert engine.requests == []
    await _clean(traces)
    assert await served(router, client)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """With some bytes changed, taken out, put in or repeated."""
    result = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(result))
        match chance.randrange(4):
            case 0:
                result[at] = chance.randrange(256)
            case 1:
                del result[at : at + chance.randrange(1, 20)]
            case 2:
                result[at:at] = chance.randbytes(chance.randrange(1, 20))
            case 3:
                result[at:at] = result[max(at - 30, 0) : at] * chance.randrange(1, 4)
        if not result:
            break
    return bytes(result)


@pytest.mark.parametrize("num_mutations", [500, pytest.param(5_000, marks=pytest.mark.slow)])
async def test_requests_with_random_faults_get_an_answer_or_a_closed_connection(
    num_mutations: int, engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine)
    assert await served(router, client)
    traces, chance = Traces(router), random.Random(11)
    seeds = (
        request_bytes(stream=False),
        request_bytes(stream=True),
        chunked(b'{"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1}', 9),
        b"GET /v1/models HTTP/1.1\r\nhost: router\r\n\r\n",
        request_bytes(stream=False, path="/v1/embeddings?a=%20"),
        request_bytes(stream=False).replace(b"host", b"x-kvasir-deadline-seconds: 5\r\nhost"),
    )
    statuses: set[int] = set()
    for seed in seeds:  # which are good as they are
        whole = await Client.open(router)
        await whole.send(seed.replace(b"host: router", b"host: router\r\nconnection: close"))
        assert (await whole.answer(patience_seconds=30)).startswith(b"HTTP/1.1 200 ")
        whole.writer.close()
    remaining = iter(range(num_mutations))

    async def keep_asking() -> None:
        for _ in remaining:
            attacker = await Client.open(router)
            with contextlib.suppress(ConnectionError):
                await attacker.send(mutated(chance.choice(seeds), chance))
            answer = await attacker.answer(patience_seconds=0.3)
            attacker.writer.close()
            statuses.update(int(status) for status in re.findall(rb"HTTP/1.1 (\d{3}) ", answer))

    await asyncio.gather(*(keep_asking() for _ in range(NUM_AT_ONCE)))
    assert 400 in statuses
    assert not {status for status in statuses if status >= 500}
    await _clean(traces)
    assert traces.num_internal_errors() == 0
    assert await served(router, client)
