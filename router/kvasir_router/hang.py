"""Ends the wait for an endpoint that was found to answer no more, when its request can go elsewhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from kvasir_router.errors import UpstreamHungError
from kvasir_router.fleet import Ticket


@contextlib.asynccontextmanager
async def interrupted_when_hung(ticket: Ticket, can_go_elsewhere: Callable[[], bool]) -> AsyncIterator[None]:
    """Raises UpstreamHungError from the block. A part of an answer that cannot be continued is left to wait on."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as interruption:

            def interrupt() -> None:
                if can_go_elsewhere() and not interruption.expired():
                    interruption.reschedule(loop.time())

            ticket.on_hung = interrupt
            yield
    except TimeoutError as error:
        if not interruption.expired():
            raise
        raise UpstreamHungError(f"{ticket.url} answers no more", "hung") from error
