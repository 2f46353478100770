"""Cancels the work on a request the moment its client goes away, streaming or not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive

from kvasir_router.errors import ClientDisconnectedError


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Raises ClientDisconnectedError in place of the cancellation. The body must have been read.

    The answer's last piece must be sent outside: after it, ASGI reports a disconnect in any case.
    """
    work = asyncio.current_task()
    assert work is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and work.uncancel() == 0:
            raise ClientDisconnectedError("the client closed the connection") from None
        raise
    finally:
        watcher.cancel()
