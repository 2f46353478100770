"""What a router takes at most, of the system, while clients do not read what they asked for."""

import asyncio
import json
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.anyio
MIB = 2**20
LIMIT_BYTES, NUM_READERS = 128 * MIB, 250
EVENT = b"data: " + b"x" * 60_000 + b"\n\n"
ROUTER = """
import asyncio, contextlib, sys, uvloop
from kvasir_router.config import RouterConfig
from kvasir_router.server import running
from kvasir_router.tuning import Tuning

async def serve(url, limit):
    config = RouterConfig(endpoint=(url,), port=0, admin_port=0, max_prefill_queue=1e6, model="tiny")
    async with running(config, tuning=Tuning(memory_limit_bytes=int(limit))) as router:
        while not router.services.of(None).registry.can_place(None):
            await asyncio.sleep(0.02)
        print(router.url.rpartition(":")[2], flush=True)
        await asyncio.Event().wait()

uvloop.run(serve(*sys.argv[1:]))
"""


async def stream_without_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine: its answer to a POST is events for as long as somebody takes them."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                continue
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
            )
            while True:
                writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                await writer.drain()
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        writer.close()


@asynccontextmanager
async def router_process(url: str) -> AsyncIterator[tuple[int, int]]:
    """Its process and its port."""
    command = (sys.executable, "-c", ROUTER, url, str(LIMIT_BYTES))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.pid, int(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


async def asking(port: int) -> socket.socket:
    """A client that has asked for a stream, and reads nothing yet; the kernel holds little of it."""
    client, loop = socket.socket(), asyncio.get_running_loop()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    body = json.dumps({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, head + body)
    return client


async def test_clients_that_do_not_read_take_a_bounded_part_of_the_limit_and_who_reads_is_served() -> None:
    engine, loop = await asyncio.start_server(stream_without_end, "127.0.0.1", 0), asyncio.get_running_loop()
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    async with engine, router_process(url) as (pid, port):
        before = peak_bytes(pid)
        with ExitStack() as stack:
            clients = [stack.enter_context(await asking(port)) for _ in range(NUM_READERS)]
            received = 0
            while received < 10 * len(EVENT):
                received += len(piece := await loop.sock_recv(clients[-1], 2**20))
                assert piece
            # A sixteenth for answers that are not read, an eighth for connections. Unbounded, it was 104 MiB.
            assert peak_bytes(pid) - before < LIMIT_BYTES / 4, f"{(peak_bytes(pid) - before) / MIB:.0f} MiB"
