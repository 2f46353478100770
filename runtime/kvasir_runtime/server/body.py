"""Reading a request's body: no more of it than the server is willing to hold, and no longer than it is to wait."""

import asyncio

from starlette.requests import Request

from kvasir_runtime.server.errors import BodyTimeoutError, BodyTooLargeError


async def read_body(request: Request, max_bytes: int, max_seconds: float) -> bytes:
    """Raises BodyTooLargeError, BodyTimeoutError, and ClientDisconnect when the client leaves before its end."""
    try:
        async with asyncio.timeout(max_seconds):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTimeoutError(f"the body has not come within {max_seconds:g} seconds; send it faster") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(declared, max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(f"more than {num_bytes - 1}", max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(seen: str, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {seen} bytes, but this server reads at most {max_bytes} (--max-body-bytes); send less"
    )
