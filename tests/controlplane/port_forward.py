"""A port through which a server is reached only while the port is open: an API server that is away, then back."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress


@contextmanager
def forwarding(address: str, port: int, to_port: int) -> Iterator[None]:
    """Connections to `port` reach `to_port` of the same address, from a thread of its own, until the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="port forward")
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(_serve(address, port, to_port), loop).result(10)
        yield
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _serve(address: str, port: int, to_port: int) -> asyncio.Server:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(address, to_port)
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    return await asyncio.start_server(connected, address, port)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError), closing(writer):
        while content := await reader.read(65536):
            writer.write(content)
            await writer.drain()


async def _end(server: asyncio.Server) -> None:
    server.close()
    connections = asyncio.all_tasks() - {asyncio.current_task()}
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
