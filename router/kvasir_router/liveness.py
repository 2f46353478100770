"""Ends the wait for an endpoint that has failed its liveness probes, when its request can go elsewhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from kvasir_router.errors import UpstreamUnresponsiveError
from kvasir_router.service.ledger import Ticket


@contextlib.asynccontextmanager
async def while_alive(ticket: Ticket, can_go_elsewhere: Callable[[], bool]) -> AsyncIterator[None]:
    """Raises UpstreamUnresponsiveError from the block. A part of an answer that cannot be continued is left to wait."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as interruption:

            def interrupt() -> None:
                if can_go_elsewhere() and not interruption.expired():
                    interruption.reschedule(loop.time())

            ticket.on_interrupt = interrupt
            yield
    except TimeoutError as error:
        if not interruption.expired():
            raise
        raise UpstreamUnresponsiveError(f"{ticket.url} answers no more", "unresponsive") from error
