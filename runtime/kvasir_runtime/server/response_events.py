"""Events of responses that are streamed in the background: clients leave their stream and come back to it.

Whoever makes a response writes its events to the store, and every stream of it, the first one too, reads them there,
whichever API process it has come to.
"""

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse

from kvasir_runtime.server.exchange import STREAM_HEADERS
from kvasir_runtime.server.response_store import ResponseStore

POLL_SECONDS = 0.05
END_OF_STREAM = b": end\n\n"
"""A comment, for the router: the last event, which repeats all of the response, cannot be known by its bytes."""
_END_OF_EVENT = b"\n\n"


def followed_events(store: ResponseStore, tenant: str, response_id: str, after: int) -> Response:
    """Those numbered above `after`, as they come, until there will be no more or the response is deleted."""
    events = _followed(store, tenant, response_id, after)
    return StreamingResponse(events, headers=STREAM_HEADERS, media_type="text/event-stream")


async def _followed(store: ResponseStore, tenant: str, response_id: str, after: int) -> AsyncIterator[bytes]:
    while (blocks := await store.events_after(tenant, response_id, after)) is not None:
        for last, block in blocks:
            if not block:
                yield END_OF_STREAM
                return
            yield _above(after, last, block)
            after = last
        await asyncio.sleep(POLL_SECONDS)


def _above(number: int, last: int, block: bytes) -> bytes:
    """Of a block the events above that number."""
    events = block.split(_END_OF_EVENT)[:-1]
    return b"".join(event + _END_OF_EVENT for event in events[-(last - number) :])
