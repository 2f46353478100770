"""Asks a local pod over HTTP whether it is ready or healthy."""

import asyncio
from urllib.parse import urlsplit

_TIMEOUT_SECONDS = 5.0


async def answers_ok(url: str) -> bool:
    """Whether GET `url` is answered with a 2xx status within 5 s.

    A plain socket and not an HTTP client: a status line is all that is asked for.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            status_line = await _status_line(parts.hostname or "", parts.port or 80, parts.path)
    except (OSError, TimeoutError, ValueError):
        return False
    words = status_line.split()
    return len(words) > 1 and words[1].startswith(b"2")


async def _status_line(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        return await reader.readline()
    finally:
        writer.close()
