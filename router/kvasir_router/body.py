"""Request bodies while they are held, all of this process together within one budget of bytes.

A body is held from its first byte, in the queue as well, until nothing can need it any more: no other attempt, and no
engine that goes on with its stream. Whoever handles the request drops it at the latest.
"""

import asyncio
from typing import Any

from starlette.types import Receive

from kvasir_router.errors import (
    BodyBudgetExceededError,
    BodyTimeoutError,
    BodyTooLargeError,
    ClientDisconnectedError,
)

BODY_SECONDS = 30.0
"""For a request's body, and one more for every BODY_BYTES_PER_SECOND that have come."""
BODY_BYTES_PER_SECOND = 64 * 1024
# Bodies come and go with the requests that they are of.
_RETRY_SECONDS = 1


class BodyBudget:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises BodyBudgetExceededError (503)."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise BodyBudgetExceededError(
                f"the router holds {self.num_bytes} bytes of requests already, of at most {self._max_bytes}; "
                "try again later",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Body:
    """One request's. `content` may be changed by its owner; the budget counts what the client has sent."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0
        self.content = b""

    def drop(self) -> None:
        """May be repeated."""
        self._budget.give_back(self._num_bytes)
        self._num_bytes = 0
        self.content = b""

    async def read(self, receive: Receive, max_bytes: int, announced_bytes: int = 0) -> None:
        """Raises BodyTooLargeError (413), before reading anything where the length is announced, BodyTimeoutError (408)
        and BodyBudgetExceededError (503). A slow client gets more time with every byte, a stalled one does not.
        """
        if announced_bytes > max_bytes:
            raise _too_large(max_bytes)
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        chunks: list[bytes] = []
        has_more = True
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                while has_more:
                    chunk, has_more = await _next(receive)
                    chunks.append(self._held(chunk, max_bytes))
                    timeout.reschedule(deadline + self._num_bytes / BODY_BYTES_PER_SECOND)
        except TimeoutError as error:
            raise BodyTimeoutError(f"the request body stalled after {self._num_bytes} bytes; send it faster") from error
        self.content = chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _held(self, chunk: bytes, max_bytes: int) -> bytes:
        if self._num_bytes + len(chunk) > max_bytes:
            raise _too_large(max_bytes)
        self._budget.take(len(chunk))
        self._num_bytes += len(chunk)
        return chunk


async def _next(receive: Receive) -> tuple[bytes, bool]:
    """A chunk, and whether there are more. Raises ClientDisconnectedError."""
    message: Any = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnectedError("the client closed the connection while sending its request")
    return message["body"], message["more_body"]


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body is larger than {max_bytes} bytes, the most this router takes")
