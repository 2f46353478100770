"""Ends the wait for an endpoint that has failed its liveness probes, when its request can go elsewhere."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from kvasir_router.errors import UpstreamUnresponsiveError
from kvasir_router.service.ledger import Ticket


@contextlib.contextmanager
def while_alive(ticket: Ticket, can_go_elsewhere: Callable[[bool], bool]) -> Iterator[None]:
    """Raises UpstreamUnresponsiveError from the block, which belongs to a task. `can_go_elsewhere` is told whether the
    endpoint is merely silent.

    A part of an answer that cannot be continued is left to wait. As `asyncio.timeout`, but without its timer.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancellations = task.cancelling()
    is_interrupted = False

    def interrupt(is_silent: bool) -> None:
        nonlocal is_interrupted
        if not is_interrupted and can_go_elsewhere(is_silent):
            is_interrupted = True
            task.cancel()

    ticket.on_interrupt = interrupt
    try:
        yield
    except asyncio.CancelledError as error:
        if is_interrupted and task.uncancel() <= num_cancellations:
            raise UpstreamUnresponsiveError(f"{ticket.url} answers no more", "unresponsive") from error
        raise
    except BaseException:
        if is_interrupted:
            task.uncancel()
        raise
